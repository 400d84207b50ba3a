/// Everything of libfsdp. Single headers can be included instead.
#pragma once

#include <fsdp/adamw.h>
#include <fsdp/checkpoint.h>
#include <fsdp/clip_result.h>
#include <fsdp/distributed_sampler.h>
#include <fsdp/exchange.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/grad_scaler.h>
#include <fsdp/lora.h>
#include <fsdp/lr_schedule.h>
#include <fsdp/optimizer_state.h>
#include <fsdp/options.h>
#include <fsdp/plan.h>
#include <fsdp/process_group.h>
#include <fsdp/safetensors.h>
#include <fsdp/stats.h>
#include <fsdp/weights.h>
#include <fsdp/wrap_policy.h>
