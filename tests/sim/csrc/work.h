// What a collective returns, and what carries its bytes.
#pragma once
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <future>

#include "device.h"

namespace sim {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The tensors of a collective, which its backend holds, as NCCL's does, until the work is waited for or has ended.
// Holds tensors only: memory that `resize_` takes from them is free at once.
struct Shelf {
  StreamId stream;
  MomentPtr done;
  Tensors tensors;
};
using ShelfPtr = std::shared_ptr<Shelf>;

// A collective on its stream: `wait` makes the current stream wait, never the host.
class SimWork final : public c10d::Work {
 public:
  SimWork(ShelfPtr shelf, Tensors outputs);
  bool isCompleted() override;
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  ShelfPtr shelf_;
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Waits for a work of the host on a thread of its own: gloo's sends and receives end only in `wait`.
class WaitedWork final : public c10d::Work {
 public:
  WaitedWork(WorkPtr work, Tensors held);
  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  std::shared_future<void> ended_;  // the scheduler may ask again after `wait`
};

}  // namespace sim
