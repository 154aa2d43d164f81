// Every other operator, by one boxed fallback: the Meta kernel tells the sizes of the results now, the CPU kernel
// computes them later, on memory that the task knows by address only.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <set>

#include "device.h"

namespace sim {
namespace {

using Stack = torch::jit::Stack;

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// `value` with each of its tensors replaced by what `map` makes of it.
template <class Map>
c10::IValue mapped(const c10::IValue& value, const Map& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(map(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector())
      list.push_back(each && each->defined() ? std::optional<at::Tensor>(map(*each)) : std::nullopt);
    return list;
  }
  return value;
}

template <class See>
void each_tensor(const c10::IValue& value, const See& see) {
  mapped(value, [&](const at::Tensor& t) { see(t); return t; });
}

bool is_random(const c10::OperatorHandle& op) {
  for (auto tag : op.getTags())
    if (tag == at::Tag::nondeterministic_seeded) return true;
  return false;
}

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// A call as its task knows it: nothing in it keeps memory of the device alive, or sees later changes of host memory.
struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> plain;
  std::vector<std::vector<std::optional<Alias>>> aliases;  // by argument; none for a tensor of the host
  std::vector<std::pair<size_t, uint64_t>> seeds;  // of the arguments that are generators

  Call(const c10::OperatorHandle& op, const Stack& stack, size_t first, int device) : op(op) {
    for (size_t i = first; i < stack.size(); i++) {
      aliases.emplace_back();
      plain.push_back(mapped(stack[i], [&](const at::Tensor& t) {
        if (is_on_device(t)) {
          aliases.back().push_back(Alias(t));
          return at::empty({0}, at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
        }
        aliases.back().push_back(std::nullopt);
        return t.defined() ? t.detach().clone() : t;
      }));
      if (!takes_generator(op.schema().arguments()[i - first])) continue;
      auto given = stack[i].isNone() ? std::nullopt : std::optional(stack[i].toGenerator());
      seeds.push_back({i - first, next_seed(given, device)});
    }
    TORCH_CHECK(!is_random(op) || !seeds.empty(), op.schema().name(), " takes no generator: it is missing on sim");
  }

  Stack run() const {
    Stack stack;
    for (size_t i = 0; i < plain.size(); i++) {
      size_t next = 0;
      stack.push_back(mapped(plain[i], [&](const at::Tensor& t) {
        auto& alias = aliases[i][next++];
        return alias ? alias->cpu() : t;
      }));
      if (stack.back().isDevice()) stack.back() = c10::Device(at::kCPU);
    }
    for (auto& [argument, seed] : seeds) stack[argument] = at::detail::createCPUGenerator(seed);
    // Some kernels resize an `out` on their way, which memory known by address cannot be.
    std::vector<std::pair<at::Tensor, at::Tensor>> outs;
    for (size_t i = 0; i < stack.size(); i++)
      if (op.schema().arguments()[i].is_out())
        stack[i] = mapped(stack[i], [&](const at::Tensor& t) {
          outs.push_back({t, at::empty({0}, t.options())});
          return outs.back().second;
        });
    op.callBoxed(&stack);
    for (auto& [target, made] : outs) target.copy_(made);
    return stack;
  }
};

// Their Meta kernels give dtypes other than the CPU's kernels, which are asked on zeros instead.
bool is_told_by_cpu(const std::string& name) {
  static const std::set<std::string> names{"aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"};
  return names.count(name);
}

at::Tensor to_zeros(const at::Tensor& t) {
  if (!is_on_device(t)) return t;
  return at::zeros(t.sizes(), at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
}

at::Tensor to_meta(const at::Tensor& t) {
  if (!is_on_device(t)) return t;
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()).device(at::kMeta));
}

// The results on the Meta device; none if their sizes depend on values.
std::optional<Stack> shapes_of(const c10::OperatorHandle& op, const Stack& stack, size_t first) {
  Stack meta;
  for (size_t i = first; i < stack.size(); i++) {
    meta.push_back(mapped(stack[i], is_told_by_cpu(op.schema().name()) ? to_zeros : to_meta));
    if (meta.back().isDevice()) meta.back() = c10::Device(at::kMeta);
    if (meta.back().isGenerator()) meta.back() = c10::IValue();
  }
  try {
    op.callBoxed(&meta);
  } catch (const std::exception&) {  // c10::Error too
    return std::nullopt;
  }
  for (auto& value : meta)
    if (!value.isTensor() && !value.isTensorList()) return std::nullopt;
  return meta;
}

// Of 2-byte elements; operations of wider ones count as many times more.
double flops_of(const std::string& name, const Stack& stack, size_t first) {
  static const std::map<std::string, size_t> left{  // the argument that is the left factor; the right one follows
      {"aten::mm", 0}, {"aten::bmm", 0}, {"aten::addmm", 1}, {"aten::baddbmm", 1}, {"aten::addbmm", 1}};
  auto it = left.find(name);
  if (it == left.end()) return 0;
  const auto& factor = stack[first + it->second].toTensor();
  return factor.numel() * static_cast<double>(factor.element_size()) * stack[first + it->second + 1].toTensor().size(-1);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  size_t count = schema.arguments().size(), first = stack->size() - count;
  for (const auto& result : schema.returns())
    TORCH_CHECK(!result.alias_info() || result.alias_info()->isWrite(), "view operator ", name, " is missing on sim");

  int device = current_device();
  std::vector<at::Tensor> written;
  bool lacks_size = false;  // an `out` that the operator resizes
  for (size_t i = 0; i < count; i++) {
    const auto& argument = schema.arguments()[i];
    each_tensor((*stack)[first + i], [&](const at::Tensor& t) {
      if (!t.defined()) return;
      TORCH_CHECK(!writes(argument) || is_on_device(t), name, " writes to a tensor on ", t.device());
      if (!is_on_device(t)) return;
      device = t.device().index();
      if (!writes(argument)) return;
      written.push_back(t);
      lacks_size = lacks_size || (argument.kwarg_only() && !t.numel());
    });
    if ((*stack)[first + i].isDevice()) device = device_index((*stack)[first + i].toDevice());
  }
  bool is_functional = written.empty();
  std::optional<Stack> shapes;
  if (is_functional || lacks_size) shapes = shapes_of(op, *stack, first);
  if (lacks_size) {
    TORCH_CHECK(shapes, "the size of what ", name, " writes depends on values: it is missing on sim");
    size_t next = 0;
    for (const auto& value : *shapes)
      each_tensor(value, [&](const at::Tensor& t) { resize_(written[next++], t.sizes(), std::nullopt); });
  }

  Task task{name, {}, flops_of(name, *stack, first)};
  for (size_t i = 0; i < count; i++)
    each_tensor((*stack)[first + i], [&](const at::Tensor& t) {
      if (is_on_device(t)) touch(task.ranges, t, writes(schema.arguments()[i]));
    });
  StreamId stream = current_stream(device);
  auto call = std::make_shared<Call>(op, *stack, first, device);
  c10::Device where(DEVICE, device);
  Stack results;

  if (!is_functional) {
    size_t next = 0;
    for (const auto& result : schema.returns()) {
      TORCH_CHECK(result.alias_info() && next < written.size(), "the results of ", name, " are missing on sim");
      results.push_back(written[next++]);
    }
    enqueue(stream, std::move(task), [call] { in_clean_state([&] { call->run(); }); });
  } else if (shapes) {
    auto targets = std::make_shared<std::vector<Alias>>();
    for (auto& value : *shapes)
      results.push_back(mapped(value, [&](const at::Tensor& t) {
        if (!t.defined()) return t;
        auto made = empty_strided(t.sizes(), t.strides(), t.scalar_type(), std::nullopt, where, std::nullopt);
        touch(task.ranges, made, true);
        targets->push_back(Alias(made));
        return made;
      }));
    enqueue(stream, std::move(task), [call, targets] {
      in_clean_state([&] {
        size_t next = 0;
        for (auto& value : call->run())
          each_tensor(value, [&](const at::Tensor& t) {
            if (t.defined()) (*targets)[next++].cpu().copy_(t);
          });
      });
    });
  } else {  // what there is depends on values: the host waits
    auto made = std::make_shared<Stack>();
    enqueue(stream, std::move(task), [call, made] { in_clean_state([&] { *made = call->run(); }); });
    synchronize_stream(stream);
    for (auto& value : *made)
      results.push_back(mapped(value, [&](const at::Tensor& t) { return t.defined() ? t.to(where) : t; }));
  }
  stack->resize(first);
  for (auto& result : results) stack->push_back(std::move(result));
}

// ---- operators that would otherwise become others

c10::OperatorHandle named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const c10::OperatorHandle&, Stack* stack) { fallback(named("aten::convolution"), stack); }

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  size_t first = stack->size() - 10;
  const auto& grad = (*stack)[first].toTensor();
  bool is_transposed = (*stack)[first + 6].toBool();
  const auto& weight = (*stack)[first + 2].toTensor();
  int64_t channels = is_transposed ? weight.size(1) * (*stack)[first + 8].toInt() : weight.size(0);
  TORCH_CHECK(grad.defined());
  stack->insert(stack->begin() + first + 3, c10::IValue(std::vector<int64_t>{channels}));
  fallback(named("aten::convolution_backward"), stack);
}

// The CPU's draws from the default generator of the host.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

// One kernel if all tensors are dense and on the device, as with CUDA; otherwise a copy each.
void foreach_copy_(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  auto fits = [](const at::Tensor& t) { return is_on_device(t) && t.is_non_overlapping_and_dense(); };
  if (std::all_of(targets.begin(), targets.end(), fits) && std::all_of(sources.begin(), sources.end(), fits)) {
    Stack stack{targets.vec(), sources.vec(), non_blocking};
    fallback(named("aten::_foreach_copy_"), &stack);
    return;
  }
  for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(sources[i], non_blocking);
}

auto boxed() { return torch::CppFunction::makeFromBoxedFunction<&fallback>(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_layer_norm", boxed());  // otherwise its parts, whose results differ from the CPU's
  m.impl("native_group_norm", boxed());
  m.impl("native_dropout", &native_dropout);
  m.impl("_foreach_copy_", &foreach_copy_);
  m.impl("split_with_sizes_copy.out", boxed());  // one kernel
  m.impl("_chunk_cat.out", boxed());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace
}  // namespace sim
