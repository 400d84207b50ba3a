#include <fsdp/wrap_policy.h>

#include <c10/util/Exception.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

namespace fsdp {

WrapPolicy size_based_auto_wrap_policy(int64_t min_num_params) {
  TORCH_CHECK(min_num_params >= 0, "size_based_auto_wrap_policy: min_num_params counts elements and must be at least 0, got ",
              min_num_params);
  return [min_num_params](const torch::nn::Module& module, bool recurse, int64_t nonwrapped_numel) {
    if (nonwrapped_numel < min_num_params) return false;
    if (recurse) return dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module) == nullptr;
    return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) == nullptr &&
           dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) == nullptr;
  };
}

WrapPolicy lambda_auto_wrap_policy(std::function<bool(const torch::nn::Module&)> is_unit) {
  TORCH_CHECK(is_unit, "lambda_auto_wrap_policy: got an empty function");
  return [is_unit = std::move(is_unit)](const torch::nn::Module& module, bool recurse, int64_t) { return recurse || is_unit(module); };
}

}  // namespace fsdp
