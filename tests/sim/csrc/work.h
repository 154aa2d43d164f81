// What a collective returns, and what carries its bytes.
#pragma once
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <future>

#include "device.h"

namespace sim {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A collective on its stream: `wait` makes the current stream wait, never the host.
class SimWork final : public c10d::Work {
 public:
  SimWork(int device, MomentPtr done, Tensors inputs, Tensors outputs);
  bool isCompleted() override;
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  int device_;
  MomentPtr done_;
  Tensors inputs_, outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Waits for a work of the host on a thread of its own: gloo's sends and receives end only in `wait`.
class WaitedWork final : public c10d::Work {
 public:
  WaitedWork(WorkPtr work, Tensors held);
  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  std::future<void> ended_;
};

}  // namespace sim
