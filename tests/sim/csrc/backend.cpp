// A backend of torch.distributed: collectives run on a stream of their own, as NCCL's; another backend carries their
// bytes.
//
// Before its data, each collective of all ranks compares its name and sizes with the other ranks': where NCCL would
// hang or mix bytes up, every rank raises and says what each of them called.
#include "backend.h"

#include <ATen/ATen.h>

#include <cstring>
#include <map>

#include "device.h"
#include "work.h"

namespace sim {
namespace {

using Issue = std::function<WorkPtr(Tensors& in, Tensors& out)>;
using Finish = std::function<void(Tensors& in, Tensors& out)>;

// One collective, as the task knows it.
struct Part {
  std::string name;
  bool is_of_all;  // ranks, and so compared; otherwise it is between two
  std::vector<Alias> in, out;
  std::string sizes;
  Issue issue;
  Finish finish;
  Tensors host_in, host_out;
  WorkPtr work;
  std::string signature() const { return name + " of " + sizes; }
};

constexpr int64_t SIGNATURE = 256;

struct Comparison {
  std::string own;
  at::Tensor mine, every;
  WorkPtr work;
};

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(c10::intrusive_ptr<c10d::Backend> host, int rank, int size) : Backend(rank, size), host_(std::move(host)) {}
  const std::string getBackendName() const override { return "sim"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return host_->getBackendOptions(); }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return count_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return launch("broadcast", tensors, tensors, [=, host = host_](Tensors& in, Tensors& out) {
      out[0].copy_(in[0]);
      return host->broadcast(out, opts);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return reduced_to(-1, "allreduce", tensors, opts.reduceOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return reduced_to(opts.rootRank, "reduce", tensors, opts.reduceOp);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return launch("all_gather", {input}, {output}, [=, host = host_](Tensors& in, Tensors& out) {
      at::Tensor flat = out[0].view({-1});
      in[0] = in[0].view({-1});
      return host->_allgather_base(flat, in[0], opts);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch(
        "all_gather_list", inputs, outputs[0],
        [=, this](Tensors& in, Tensors& out) {  // of unequal sizes, as NCCL's
          Tensors sent(getSize(), in[0]);
          return exchanged(out, sent);
        },
        nullptr, sizes_of(outputs[0]));
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    auto op = opts.reduceOp;
    auto every = std::make_shared<at::Tensor>();
    return launch(
        "reduce_scatter", {input}, {output},
        [=, this, host = host_](Tensors& in, Tensors&) {
          in[0] = in[0].reshape({getSize(), -1});
          *every = at::empty_like(in[0]);
          std::vector<int64_t> none;
          return host->alltoall_base(*every, in[0], none, none, c10d::AllToAllOptions());
        },
        [=](Tensors&, Tensors& out) { out[0] = reduced(*every, op).view(out[0].sizes()); });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto op = opts.reduceOp;
    auto every = std::make_shared<Tensors>();
    return launch(
        "reduce_scatter_list", inputs[0], outputs,
        [=, this, host = host_](Tensors& in, Tensors& out) {
          for (int i = 0; i < getSize(); i++) every->push_back(at::empty_like(out[0]));
          return exchanged(*every, in);
        },
        [=](Tensors&, Tensors& out) { out[0] = reduced(at::stack(*every), op); });
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
      const c10d::AllToAllOptions& opts) override {
    bool is_even = to.empty() && from.empty();
    return launch(
        "all_to_all", {input}, {output},
        [=, host = host_](Tensors& in, Tensors& out) mutable { return host->alltoall_base(out[0], in[0], to, from, opts); },
        nullptr, is_even ? "" : "uneven parts");
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return launch(
        "all_to_all_list", inputs, outputs, [this, host = host_](Tensors& in, Tensors& out) { return exchanged(out, in); },
        nullptr, "uneven parts");
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    bool is_root = !inputs.empty();
    return launch(
        "scatter", is_root ? inputs[0] : Tensors(), outputs,
        [=, host = host_](Tensors& in, Tensors& out) {
          std::vector<Tensors> lists;
          if (is_root) lists.push_back(in);
          return host->scatter(out, lists, opts);
        },
        nullptr, sizes_of(outputs));
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    bool is_root = !outputs.empty();
    return launch(
        "gather", inputs, is_root ? outputs[0] : Tensors(),
        [=, host = host_](Tensors& in, Tensors& out) {
          std::vector<Tensors> lists;
          if (is_root) lists.push_back(out);
          return host->gather(lists, in, opts);
        },
        nullptr, sizes_of(inputs));
  }

  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    return launch("send", tensors, {}, [=, host = host_](Tensors& in, Tensors&) { return host->send(in, rank, tag); }, nullptr, "", false);
  }

  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    return launch("recv", {}, tensors, [=, host = host_](Tensors&, Tensors& out) { return host->recv(out, rank, tag); }, nullptr, "", false);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Tensors one{at::zeros({1}, at::TensorOptions().device(c10::Device(DEVICE, current_device())))};
    auto work = allreduce(one, c10d::AllreduceOptions());
    work->wait();
    synchronize_stream(current_stream(current_device()));
    return work;
  }

  // ---- several in one: what is launched between start and end is issued together

  void startCoalescing() override { depth_++; }

  WorkPtr endCoalescing() override {
    if (--depth_) return nullptr;
    auto parts = std::move(coalesced_);
    coalesced_.clear();
    Tensors inputs = std::move(held_in_), outputs = std::move(held_out_);
    held_in_.clear();
    held_out_.clear();
    if (parts.empty()) return c10::make_intrusive<SimWork>(std::make_shared<Shelf>(stream_on(current_device())), outputs);
    return put(std::move(parts), std::move(inputs), std::move(outputs));
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    startCoalescing();
    for (auto& t : tensors) {
      Tensors one{t};
      allreduce(one, opts);
    }
    return endCoalescing();
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    startCoalescing();
    for (size_t i = 0; i < inputs.size(); i++) _allgather_base(outputs[i], inputs[i], opts);
    return endCoalescing();
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    startCoalescing();
    for (size_t i = 0; i < inputs.size(); i++) _reduce_scatter_base(outputs[i], inputs[i], opts);
    return endCoalescing();
  }

 private:
  static at::Tensor reduced(const at::Tensor& rows, c10d::ReduceOp op) {  // in rank order: the same each time
    using Op = c10d::ReduceOp;
    at::Tensor total = rows[0].clone();
    for (int64_t i = 1; i < rows.size(0); i++) {
      if (op == Op::SUM || op == Op::AVG) total.add_(rows[i]);
      else if (op == Op::PRODUCT) total.mul_(rows[i]);
      else if (op == Op::MAX) total = at::maximum(total, rows[i]);
      else if (op == Op::MIN) total = at::minimum(total, rows[i]);
      else if (op == Op::BAND) total.bitwise_and_(rows[i]);
      else if (op == Op::BOR) total.bitwise_or_(rows[i]);
      else if (op == Op::BXOR) total.bitwise_xor_(rows[i]);
      else TORCH_CHECK(false, "this reduction is missing on sim");
    }
    if (op == Op::AVG) total.div_(rows.size(0));
    return total;
  }

  static std::string sizes_of(const Tensors& tensors) {
    std::string sizes;
    for (auto& t : tensors) sizes += (sizes.empty() ? "" : ", ") + std::to_string(t.numel()) + " " + toString(t.scalar_type());
    return sizes;
  }

  WorkPtr reduced_to(int root, const std::string& name, Tensors& tensors, c10d::ReduceOp op) {
    auto every = std::make_shared<at::Tensor>();
    return launch(
        name, tensors, tensors,
        [=, this, host = host_](Tensors& in, Tensors& out) {
          out[0].copy_(in[0]);
          *every = at::empty({getSize() * in[0].numel()}, in[0].options());
          in[0] = in[0].reshape({-1});
          return host->_allgather_base(*every, in[0], c10d::AllgatherOptions());
        },
        [=, this](Tensors&, Tensors& out) {
          if (root < 0 || root == getRank()) out[0] = reduced(every->view({getSize(), -1}), op).view(out[0].sizes());
        });
  }

  // Each rank's part of `in` to that rank; lists of any sizes.
  WorkPtr exchanged(Tensors& out, Tensors& in) {
    std::vector<int64_t> to, from;
    Tensors flat;
    for (auto& t : in) {
      from.push_back(t.numel());
      flat.push_back(t.view({-1}));
    }
    int64_t total = 0;
    for (auto& t : out) {
      to.push_back(t.numel());
      total += t.numel();
    }
    at::Tensor sent = at::cat(flat), received = at::empty({total}, out[0].options());
    int64_t at = 0;
    for (size_t i = 0; i < out.size(); at += to[i++]) out[i] = received.narrow(0, at, to[i]).view(out[i].sizes());
    return host_->alltoall_base(received, sent, to, from, c10d::AllToAllOptions());
  }

  StreamId stream_on(int device) {
    auto it = streams_.find(device);
    if (it == streams_.end()) it = streams_.emplace(device, new_stream(device, 0)).first;
    return it->second;
  }

  WorkPtr launch(
      const std::string& name, const Tensors& inputs, const Tensors& outputs, Issue issue, Finish finish = nullptr,
      std::string sizes = "", bool is_of_all = true) {
    for (auto* tensors : {&inputs, &outputs})
      for (auto& t : *tensors) {
        TORCH_CHECK(t.is_contiguous(), "tensors must be contiguous");
        TORCH_CHECK(is_on_device(t), "tensors must be on sim, but one of ", name, " is on ", t.device());
      }
    count_++;
    Part part{name, is_of_all};
    for (auto& t : inputs) part.in.emplace_back(t);
    for (auto& t : outputs) part.out.emplace_back(t);
    part.sizes = sizes.empty() ? sizes_of(inputs) : sizes;
    part.issue = std::move(issue);
    part.finish = std::move(finish);
    if (depth_) {
      coalesced_.push_back(std::move(part));
      held_in_.insert(held_in_.end(), inputs.begin(), inputs.end());
      held_out_.insert(held_out_.end(), outputs.begin(), outputs.end());
      return nullptr;
    }
    std::vector<Part> parts;
    parts.push_back(std::move(part));
    return put(std::move(parts), inputs, outputs);
  }

  WorkPtr put(std::vector<Part> given, Tensors inputs, Tensors outputs) {
    int device = (inputs.empty() ? outputs : inputs)[0].device().index();
    StreamId stream = stream_on(device);
    clear_shelves();
    sim::wait(stream, record(current_stream(device)));
    Task task{given.size() == 1 ? given[0].name : "coalesced"};
    for (auto& t : inputs) touch(task.ranges, t, false);
    for (auto& t : outputs) touch(task.ranges, t, true);
    auto parts = std::make_shared<std::vector<Part>>(std::move(given));
    auto compared = std::make_shared<Comparison>();
    for (auto& part : *parts)
      if (part.is_of_all) compared->own += (compared->own.empty() ? "" : "; ") + part.signature();
    auto exchange = std::make_shared<Exchange>();
    // A queued collective keeps the backend alive.
    auto self = c10::intrusive_ptr<SimBackend>::reclaim_copy(this);
    exchange->issue = [=] { in_clean_state([&] { self->start(*parts, *compared); }); };
    exchange->poll = [=] {
      bool done = false;
      in_clean_state([&] { done = self->is_done(*parts, *compared); });
      return done;
    };
    exchange->finish = [=] { in_clean_state([&] { self->finish(*parts, *compared); }); };
    enqueue_exchange(stream, std::move(task), exchange);
    inputs.insert(inputs.end(), outputs.begin(), outputs.end());
    shelves_.push_back(std::make_shared<Shelf>(stream, record(stream), std::move(inputs)));
    return c10::make_intrusive<SimWork>(shelves_.back(), std::move(outputs));
  }

  // That a work has ended orders nothing but the reuse of its memory, so the host does not see it.
  void clear_shelves() {
    std::erase_if(shelves_, [](const ShelfPtr& shelf) {
      if (!shelf->tensors.empty() && has_passed(shelf->done)) {
        for (auto& t : shelf->tensors) record_stream(t.storage().mutable_data(), shelf->stream);
        shelf->tensors.clear();
      }
      return shelf->tensors.empty();
    });
  }

  // ---- within a task

  void start(std::vector<Part>& parts, Comparison& compared) {
    if (getSize() == 1 || compared.own.empty()) return send_data(parts);
    compared.mine = at::zeros({SIGNATURE}, at::kByte);
    size_t length = std::min<size_t>(SIGNATURE - 1, compared.own.size());
    memcpy(compared.mine.data_ptr(), compared.own.data() + compared.own.size() - length, length);
    compared.every = at::zeros({getSize() * SIGNATURE}, at::kByte);
    compared.work = host_->_allgather_base(compared.every, compared.mine, c10d::AllgatherOptions());
  }

  void send_data(std::vector<Part>& parts) {
    for (auto& part : parts) {
      for (auto& alias : part.in) part.host_in.push_back(alias.cpu().clone());
      for (auto& alias : part.out) part.host_out.push_back(at::empty_like(alias.cpu()));
      part.work = part.issue(part.host_in, part.host_out);
      if (!part.is_of_all) part.work = c10::make_intrusive<WaitedWork>(part.work, part.host_in.empty() ? part.host_out : part.host_in);
    }
  }

  bool is_done(std::vector<Part>& parts, Comparison& compared) {
    if (compared.work) {
      if (!compared.work->isCompleted()) return false;
      compared.work->wait();
      compared.work = nullptr;
      if (differing(compared).empty()) send_data(parts);
    }
    for (auto& part : parts)
      if (part.work && !part.work->isCompleted()) return false;
    return true;
  }

  std::string differing(const Comparison& compared) const {
    if (!compared.every.defined()) return "";
    auto every = compared.every.view({getSize(), SIGNATURE});
    bool differs = false;
    std::string text;
    for (int rank = 0; rank < getSize(); rank++) {
      differs = differs || !every[rank].equal(compared.mine);
      text += "\n    rank " + std::to_string(rank) + ": " + static_cast<const char*>(every[rank].data_ptr());
    }
    return differs ? text : "";
  }

  void finish(std::vector<Part>& parts, Comparison& compared) {
    auto text = differing(compared);
    TORCH_CHECK(text.empty(), "the ranks of a group call different collectives:", text);
    for (auto& part : parts) {
      if (part.work) part.work->wait();
      if (part.finish) part.finish(part.host_in, part.host_out);
      for (size_t i = 0; i < part.out.size(); i++) part.out[i].cpu().copy_(part.host_out[i]);
    }
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  std::map<int, StreamId> streams_;
  std::vector<ShelfPtr> shelves_;
  uint64_t count_ = 0;
  int depth_ = 0;
  std::vector<Part> coalesced_;
  Tensors held_in_, held_out_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& host, int rank, int size) {
  return c10::make_intrusive<SimBackend>(host, rank, size);
}

}  // namespace sim
