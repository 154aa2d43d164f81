// A backend of torch.distributed for tensors of the device: a stream of its own, as NCCL has; gloo carries the bytes.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "ops.h"

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

class SimWork final : public Work {
 public:
  SimWork(int device, MomentPtr done, Tensors held) : device_(device), done_(std::move(done)), held_(std::move(held)) {}
  bool isCompleted() override { return query(done_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    sim::wait(current_stream(device_), done_);
    held_.clear();
    return true;
  }
  void synchronize() override { wait(c10d::kUnsetTimeout); }

 private:
  int device_;
  MomentPtr done_;
  Tensors held_;
};

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(c10::intrusive_ptr<c10d::Backend> host, int rank, int size) : Backend(rank, size), host_(std::move(host)) {}
  const std::string getBackendName() const override { return "sim"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return host_->getBackendOptions(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return launch("broadcast", tensors, tensors, [=, this, self = self()](Tensors& in, Tensors& out) {
      out[0].copy_(in[0]);
      return host_->broadcast(out, opts);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto op = opts.reduceOp;
    auto every = std::make_shared<at::Tensor>();
    return launch("allreduce", tensors, tensors, [=, this, self = self()](Tensors& in, Tensors&) {
      *every = at::empty({getSize() * in[0].numel()}, in[0].options());
      in[0] = in[0].reshape({-1});
      return host_->_allgather_base(*every, in[0], c10d::AllgatherOptions());
    }, [=, this, self = self()](Tensors&, Tensors& out) { out[0] = reduced(every->view({getSize(), -1}), op).view(out[0].sizes()); });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return launch("all_gather", {input}, {output}, [=, this, self = self()](Tensors& in, Tensors& out) {
      at::Tensor flat = out[0].view({-1});
      in[0] = in[0].view({-1});
      return host_->_allgather_base(flat, in[0], opts);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch("all_gather", inputs, outputs[0], [=, this, self = self()](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return host_->allgather(lists, in, opts);
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    auto op = opts.reduceOp;
    auto every = std::make_shared<at::Tensor>();
    return launch("reduce_scatter", {input}, {output}, [=, this, self = self()](Tensors& in, Tensors&) {
      in[0] = in[0].reshape({getSize(), -1});
      *every = at::empty_like(in[0]);
      std::vector<int64_t> none;
      return host_->alltoall_base(*every, in[0], none, none, c10d::AllToAllOptions());
    }, [=, this, self = self()](Tensors&, Tensors& out) { out[0] = reduced(*every, op).view(out[0].sizes()); });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
                        const c10d::AllToAllOptions& opts) override {
    return launch("all_to_all", {input}, {output}, [=, this, self = self()](Tensors& in, Tensors& out) mutable {
      return host_->alltoall_base(out[0], in[0], to, from, opts);
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    bool root = !inputs.empty();
    return launch("scatter", root ? inputs[0] : Tensors(), outputs, [=, this, self = self()](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (root) lists.push_back(in);
      return host_->scatter(out, lists, opts);
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    bool root = !outputs.empty();
    return launch("gather", inputs, root ? outputs[0] : Tensors(), [=, this, self = self()](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (root) lists.push_back(out);
      return host_->gather(lists, in, opts);
    });
  }

  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    return launch("send", tensors, {}, [=, this, self = self()](Tensors& in, Tensors&) { return host_->send(in, rank, tag); });
  }

  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    return launch("recv", {}, tensors, [=, this, self = self()](Tensors&, Tensors& out) { return host_->recv(out, rank, tag); });
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Tensors one{at::zeros({1}, at::TensorOptions().device(c10::Device(c10::DeviceType::PrivateUse1, current_device)))};
    auto work = allreduce(one, c10d::AllreduceOptions());
    work->wait();
    synchronize_stream(current_stream(current_device));
    return work;
  }

 private:
  c10::intrusive_ptr<SimBackend> self() {  // a queued collective keeps the backend alive
    return c10::intrusive_ptr<SimBackend>::reclaim_copy(this);
  }

  using Issue = std::function<WorkPtr(Tensors&, Tensors&)>;
  using Finish = std::function<void(Tensors&, Tensors&)>;

  static at::Tensor reduced(const at::Tensor& rows, c10d::ReduceOp op) {  // in rank order, so that it is the same each time
    at::Tensor total = rows[0].clone();
    for (int64_t i = 1; i < rows.size(0); i++) {
      if (op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG) total.add_(rows[i]);
      else if (op == c10d::ReduceOp::MAX) total = at::maximum(total, rows[i]);
      else if (op == c10d::ReduceOp::MIN) total = at::minimum(total, rows[i]);
      else TORCH_CHECK(false, "this reduction is missing on sim");
    }
    if (op == c10d::ReduceOp::AVG) total.div_(rows.size(0));
    return total;
  }

  StreamId stream_on(int device) {
    auto it = streams_.find(device);
    if (it == streams_.end()) it = streams_.emplace(device, new_stream(device, 0)).first;
    return it->second;
  }

  WorkPtr launch(const std::string& name, const Tensors& inputs, const Tensors& outputs, Issue issue, Finish finish = nullptr) {
    const at::Tensor& first = inputs.empty() ? outputs[0] : inputs[0];
    int device = first.device().index();
    for (auto& t : inputs) TORCH_CHECK(t.is_contiguous(), "tensors must be contiguous");
    for (auto& t : outputs) TORCH_CHECK(t.is_contiguous(), "tensors must be contiguous");
    StreamId stream = stream_on(device);
    sim::wait(stream, record(current_stream(device)));
    std::vector<Range> ranges;
    struct State {
      std::vector<std::function<at::Tensor()>> in, out;
      Tensors host_in, host_out;
      WorkPtr work;
    };
    auto state = std::make_shared<State>();
    for (auto& t : inputs) {
      touch_tensor(ranges, t, false);
      state->in.push_back(alias_of(t));
    }
    for (auto& t : outputs) {
      touch_tensor(ranges, t, true);
      state->out.push_back(alias_of(t));
    }
    auto exchange = std::make_shared<Exchange>();
    exchange->issue = [=] {
      in_clean_state([&] {
        for (auto& alias : state->in) state->host_in.push_back(alias().clone());
        for (auto& alias : state->out) state->host_out.push_back(at::empty_like(alias()));
        state->work = issue(state->host_in, state->host_out);
      });
    };
    exchange->poll = [=] { return !state->work || state->work->isCompleted(); };
    exchange->finish = [=] {
      in_clean_state([&] {
        if (state->work) state->work->wait();
        if (finish) finish(state->host_in, state->host_out);
        for (size_t i = 0; i < state->out.size(); i++) state->out[i]().copy_(state->host_out[i]);
      });
    };
    enqueue_exchange(stream, name, exchange, ranges);
    Tensors held(inputs);
    held.insert(held.end(), outputs.begin(), outputs.end());
    return c10::make_intrusive<SimWork>(device, record(stream), std::move(held));
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  std::map<int, StreamId> streams_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& host, int rank, int size) {
  return c10::make_intrusive<SimBackend>(host, rank, size);
}

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.def("install", &install);
  m.def("make_backend", &make_backend);
  m.def("device_count", &device_count);
  m.def("set_device_count", &set_device_count);
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { current_device = device; });
  m.def("synchronize", [](int device) { py::gil_scoped_release free; synchronize_device(device); });
  m.def("configure", [](int64_t seed, double eager, const std::string& policy) { py::gil_scoped_release free; configure(seed, eager, policy); });
  m.def("set_checks", &set_checks);
  m.def("set_factor", &set_factor);
  m.def("races", &races, py::call_guard<py::gil_scoped_release>());
  m.def("discard", [] { py::gil_scoped_release free; discard(); });
  m.def("reset", [] { py::gil_scoped_release free; reset(); });
  m.def("makespan", &makespan, py::call_guard<py::gil_scoped_release>());
  m.def("trace", [] {
    py::list list;
    for (auto& each : trace()) list.append(py::make_tuple(each.name, each.device, each.stream, each.start, each.end));
    return list;
  });
  m.def("stats", [] {
    auto& s = stats();
    py::dict d;
    d["tasks"] = s.tasks; d["syncs"] = s.syncs; d["pageable"] = s.pageable; d["host_casts"] = s.host_casts;
    d["exchanges"] = s.exchanges; d["pumped"] = s.pumped; d["forced"] = s.forced; d["reused"] = s.reused;
    return d;
  });
  m.def("allocated", &allocated);
  m.def("peak", &peak);
  m.def("reset_peak", &reset_peak);
  m.def("pin", [](uintptr_t ptr, size_t nbytes) { py::gil_scoped_release free; pin(reinterpret_cast<void*>(ptr), nbytes); });
  m.def("unpin", [](uintptr_t ptr) { py::gil_scoped_release free; return unpin(reinterpret_cast<void*>(ptr)); });
  m.def("manual_seed", [](uint64_t seed) { random_seed = seed; random_count = 0; });
  m.def("random_state", [] { return std::make_pair(random_seed, random_count); });
  m.def("set_random_state", [](uint64_t seed, uint64_t count) { random_seed = seed; random_count = count; });
  m.def("set_stack_provider", [](py::object provider) {
    if (provider.is_none()) {
      set_stack_provider(nullptr);
      return;
    }
    auto* kept = new py::object(provider);
    set_stack_provider([kept] {
      py::gil_scoped_acquire gil;
      return py::cast<std::string>((*kept)());
    });
  });
}
