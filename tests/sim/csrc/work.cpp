#include "work.h"

#include <c10/core/StreamGuard.h>

#include <thread>

namespace sim {

SimWork::SimWork(ShelfPtr shelf, Tensors outputs) : shelf_(std::move(shelf)), outputs_(std::move(outputs)) {}

bool SimWork::isCompleted() { return query(shelf_->done); }

bool SimWork::wait(std::chrono::milliseconds) {
  sim::wait(current_stream(shelf_->stream.device), shelf_->done);
  shelf_->tensors.clear();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> SimWork::getFuture() {
  if (!future_) {
    std::vector<c10::Device> devices{c10::Device(DEVICE, shelf_->stream.device)};
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    StreamId stream = new_stream(shelf_->stream.device, 0);  // has nothing but this work to wait for
    sim::wait(stream, shelf_->done);
    c10::StreamGuard guard(stream_of(stream));
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

WaitedWork::WaitedWork(WorkPtr work, Tensors held) {
  auto ended = std::make_shared<std::promise<void>>();
  ended_ = ended->get_future();
  std::thread([work, held, ended] {  // detached: the other rank may never answer
    try {
      work->wait();
      ended->set_value();
    } catch (...) {
      ended->set_exception(std::current_exception());
    }
  }).detach();
}

bool WaitedWork::isCompleted() { return ended_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

bool WaitedWork::wait(std::chrono::milliseconds) {
  ended_.get();
  return true;
}

}  // namespace sim
