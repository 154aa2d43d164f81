// Tensors: memory, views, and copies between devices and the host.
#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "device.h"

namespace sim {

Alias::Alias(const at::Tensor& t)
    : data(t.storage().data() ? static_cast<char*>(t.mutable_data_ptr()) : nullptr),
      sizes(t.sizes().vec()), strides(t.strides().vec()), dtype(t.scalar_type()) {}

at::Tensor Alias::cpu() const {
  static thread_local char nothing[64];
  return at::from_blob(data ? data : nothing, sizes, strides, at::TensorOptions().dtype(dtype).device(at::kCPU));
}

bool is_on_device(const at::Tensor& t) { return t.defined() && t.device().type() == DEVICE; }

// One range for each run of bytes without a gap, so that the columns of a matrix are not the whole matrix.
void touch(std::vector<Range>& ranges, const at::Tensor& t, bool write) {
  if (!t.numel()) return;
  char* start = static_cast<char*>(t.storage().mutable_data()) + t.storage_offset() * t.element_size();
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < t.dim(); d++)
    if (t.size(d) > 1 && t.stride(d)) dims.push_back({t.stride(d), t.size(d)});
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first <= run) {
    run = dims[inner].first * (dims[inner].second - 1) + run;
    inner++;
  }
  std::vector<int64_t> starts{0};
  for (size_t d = dims.size(); d-- > inner;) {
    if (starts.size() * dims[d].second > 4096) {  // too many: also what lies between
      for (size_t rest = inner; rest <= d; rest++) run += dims[rest].first * (dims[rest].second - 1);
      break;
    }
    std::vector<int64_t> more;
    for (auto each : starts)
      for (int64_t i = 0; i < dims[d].second; i++) more.push_back(each + i * dims[d].first);
    starts = std::move(more);
  }
  for (auto each : starts) {
    char* lo = start + each * t.element_size();
    ranges.push_back({lo, lo + run * t.element_size(), write});
  }
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  auto meta = c10::scalarTypeToTypeMeta(dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
  int before = current_device();
  set_current_device(device_index(device.value_or(c10::Device(DEVICE, -1))));
  size_t nbytes = at::detail::computeStorageNbytes(size, stride, meta.itemsize());
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, allocator().allocate(nbytes), &allocator(), true);
  set_current_device(before);
  auto t = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return t;
}

namespace {

std::vector<int64_t> dense_strides(c10::IntArrayRef size) {
  std::vector<int64_t> strides(size.size());
  int64_t next = 1;
  for (size_t d = size.size(); d-- > 0; next *= std::max<int64_t>(size[d], 1)) strides[d] = next;
  return strides;
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  auto t = empty_strided(size, dense_strides(size), dtype, layout, device, pin_memory);
  auto wanted = format.value_or(at::MemoryFormat::Contiguous);
  if (wanted != at::MemoryFormat::Contiguous && wanted != at::MemoryFormat::Preserve)
    t.unsafeGetTensorImpl()->empty_tensor_restride(wanted);
  return t;
}

}  // namespace

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto strides = dense_strides(size);
  auto* impl = self.unsafeGetTensorImpl();
  size_t needed = at::detail::computeStorageNbytes(size, strides, self.element_size(), self.storage_offset());
  if (impl->storage().nbytes() < needed)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->storage(), needed);
  impl->set_sizes_and_strides(size, strides);
  return self;
}

namespace {

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  int64_t numel = source.nbytes() / self.element_size();
  return set_storage(self, source, 0, {numel}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  auto none = empty_strided({0}, {1}, self.scalar_type(), std::nullopt, self.device(), std::nullopt);
  return set_tensor(self, none);
}

// Whether `.data =` takes the tensor: as for the devices within torch, from the host too, and in either direction.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& t) { return t.layout() == at::kStrided && (t.is_cpu() || is_on_device(t)); };
  return is_dense(self) && is_dense(from);
}

void record_tensor_stream(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().mutable_data(), id_of(stream));
}

// ---- copies: what waits for what is as in CUDA

void copy_on_device(const at::Tensor& src, const at::Tensor& dst) {
  StreamId here = current_stream(src.device().index()), there = current_stream(dst.device().index());
  if (here.device != there.device) wait(here, record(there));
  Task task{"copy_"};
  touch(task.ranges, src, false);
  touch(task.ranges, dst, true);
  Alias from(src), to(dst);
  enqueue(here, std::move(task), [=] { in_clean_state([&] { to.cpu().copy_(from.cpu()); }); });
  if (here.device != there.device) wait(there, record(here));
}

void copy_to_device(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  size_t nbytes = dst.nbytes();
  char *from = static_cast<char*>(src.mutable_data_ptr()), *to = static_cast<char*>(dst.mutable_data_ptr());
  StreamId stream = current_stream(dst.device().index());
  Task task{"copy_ to device", {{to, to + nbytes, true}}};
  if (is_pinned(from)) {
    task.ranges.push_back({from, from + nbytes, false});
    enqueue(stream, std::move(task), [=] { memcpy(to, from, nbytes); });
  } else {  // the driver has read pageable memory when the call returns
    if (non_blocking) stats().pageable++;
    auto staged = std::make_shared<std::vector<char>>(from, from + nbytes);
    enqueue(stream, std::move(task), [=] { memcpy(to, staged->data(), nbytes); });
  }
  if (!non_blocking) synchronize_stream(stream);
}

void copy_to_host(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  size_t nbytes = dst.nbytes();
  char *from = static_cast<char*>(src.mutable_data_ptr()), *to = static_cast<char*>(dst.mutable_data_ptr());
  StreamId stream = current_stream(src.device().index());
  Task task{"copy_ to host", {{from, from + nbytes, false}}};
  bool pinned = is_pinned(to);
  if (pinned) task.ranges.push_back({to, to + nbytes, true});
  enqueue(stream, std::move(task), [=] { memcpy(to, from, nbytes); });
  if (non_blocking && pinned) return;
  if (non_blocking) stats().pageable++;
  synchronize_stream(stream);
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  if (is_on_device(src) && is_on_device(dst)) {
    copy_on_device(src, dst);
    return dst;
  }
  bool same_dtype = src.scalar_type() == dst.scalar_type();
  if (same_dtype && src.sizes() == dst.sizes() && src.is_contiguous() && dst.is_contiguous()) {
    (is_on_device(dst) ? copy_to_device : copy_to_host)(src, dst, non_blocking);
    return dst;
  }
  // Without blocking the device casts and lays out, otherwise the host does.
  at::Tensor from, to;
  if (is_on_device(src) == non_blocking) {
    to = dst.is_contiguous() ? dst : at::empty_like(dst, at::MemoryFormat::Contiguous);
    from = src.to(dst.scalar_type()).expand_as(dst).contiguous();
  } else {
    bool fits = dst.is_contiguous() && same_dtype;
    to = fits ? dst : at::empty_like(dst, dst.options().dtype(src.scalar_type()), at::MemoryFormat::Contiguous);
    from = src.expand_as(dst).contiguous();
  }
  if (!non_blocking && !same_dtype) stats().host_casts++;
  to.copy_(from, non_blocking);
  if (!to.is_same(dst)) const_cast<at::Tensor&>(dst).copy_(to, non_blocking);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (dst.sizes() != src.sizes()) dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  at::Tensor host = at::empty({}, self.options().device(at::kCPU));
  copy_from(self.reshape({}), host, false);
  return host.item();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN((static_cast<at::Tensor (*)(const at::Tensor&, c10::IntArrayRef)>(&at::native::view))));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
  m.impl("record_stream", &record_tensor_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}

}  // namespace
}  // namespace sim
