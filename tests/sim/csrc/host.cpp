// The host's accesses to pinned memory, seen through a callback that torch runs at each operator call, on every thread.
//
// Not seen: what reads or writes a tensor's memory without an operator, by its address or through numpy. The Python
// module notes Tensor.numpy and Tensor.tolist as reads at the time of the call.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <set>

#include "device.h"

namespace sim {
namespace {

// Operators that only look at, or replace, what describes a tensor.
const std::set<std::string>& untouching() {
  static const auto* names = new std::set<std::string>{
      "aten::set_", "aten::resize_", "aten::resize_as_", "aten::is_pinned", "aten::is_same_size", "aten::is_set_to",
      "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like",
      "aten::randn_like", "aten::new_empty", "aten::new_empty_strided", "aten::new_zeros", "aten::new_ones",
      "aten::new_full", "aten::record_stream", "aten::_has_same_storage_numel", "aten::_is_zerotensor"};
  return *names;
}

template <class See>
void each_tensor(const c10::IValue& value, const See& see) {
  if (value.isTensor()) see(value.toTensor());
  else if (value.isTensorList()) for (const at::Tensor& t : value.toTensorList()) see(t);
  else if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
      if (t) see(*t);
}

bool is_pinned_tensor(const at::Tensor& t) {
  if (!t.defined() || !t.device().is_cpu() || !t.has_storage()) return false;
  const void* data = t.storage().data();
  return data && is_pinned(data);
}

// An operator without a kernel of its own for the CPU calls others, which are seen themselves.
bool touches_memory(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  if (untouching().count(name)) return false;
  return name == "aten::copy_" || op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

bool writes(const c10::FunctionSchema& schema, size_t i) {
  const auto& argument = schema.arguments()[i];
  if (schema.name().rfind("c10d::", 0) == 0) return argument.name().find("input") == std::string::npos;
  return argument.alias_info() && argument.alias_info()->isWrite();
}

std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& call) {
  if (!has_pinned()) return nullptr;
  bool any = false, on_device = false;
  for (const auto& value : call.inputs())
    each_tensor(value, [&](const at::Tensor& t) {
      on_device = on_device || is_on_device(t);
      any = any || is_pinned_tensor(t);
    });
  if (!any || on_device) return nullptr;  // a copy between host and device is a task of its own
  auto name = call.operator_name();
  if (!name) return nullptr;
  auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op || !touches_memory(*op)) return nullptr;
  const auto& schema = op->schema();
  std::vector<Range> ranges;
  for (size_t i = 0; i < call.inputs().size() && i < schema.arguments().size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && !alias->isWrite()) continue;  // a view
    each_tensor(call.inputs()[i], [&](const at::Tensor& t) {
      if (is_pinned_tensor(t)) touch(ranges, t, writes(schema, i));
    });
  }
  touch_on_host(schema.name(), ranges);
  return nullptr;
}

}  // namespace

void watch_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(&see).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace sim
