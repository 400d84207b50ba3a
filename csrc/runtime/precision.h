// Operators that read parameters of another dtype than the activations they meet.
//
// There is no border between modules where activations could be cast, so operators decide: one that reads a parameter kept wide runs
// wide, and its floating results return to the narrow dtype; one that reads a narrow parameter gets its wider arguments narrowed. The casts
// are made above autograd, which records them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>

namespace fsdp {

// Casts floating arguments of dtype `narrow` up to fp32. Returns whether there were any: then its results are to be narrowed. Leaves an
// operator alone that writes to a floating argument.
bool widen_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack, c10::ScalarType narrow);
void narrow_results(const c10::FunctionSchema& schema, torch::jit::Stack& stack, c10::ScalarType narrow);

// Casts floating arguments that are wider than `narrow`, and no parameters, down to it. Leaves alone an operator that writes to one, and
// one whose other argument only says what a parameter shall become.
void narrow_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack, c10::ScalarType narrow);

}  // namespace fsdp
