#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// A backend for tensors of the device that sends their bytes through `host`, a backend for tensors of the host.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& host, int rank, int size);

}  // namespace sim
