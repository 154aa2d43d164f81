// The simulated accelerator as torch sees it.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "runtime.h"

namespace sim {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;

// ---- device.cpp

int current_device();
void set_current_device(int device);
int device_index(c10::Device device);  // the current one's if it has none
StreamId current_stream(int device);
void forget_current_streams();  // of this thread
StreamId id_of(const c10::Stream& stream);
c10::Stream stream_of(StreamId id);
c10::Allocator& allocator();
void in_clean_state(const std::function<void()>& run);  // as a task runs: no autograd, no modes, not observed
void install();

// ---- random.cpp

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
uint64_t next_seed(const std::optional<at::Generator>& generator, int device);
void manual_seed(uint64_t seed);

// ---- tensors.cpp

struct Alias {  // what a task may know of a tensor: where it lies; it does not keep the memory alive
  char* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  explicit Alias(const at::Tensor& t);
  at::Tensor cpu() const;
};

bool is_on_device(const at::Tensor& t);
void touch(std::vector<Range>& ranges, const at::Tensor& t, bool write);
at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>);
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>);

// ---- host.cpp

void watch_host();  // notes every operator's accesses to pinned memory of the host

}  // namespace sim
