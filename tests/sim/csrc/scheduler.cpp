// Streams are queues. Their work is done while the host waits, or by chance when it issues work ("eagerness"): each time
// one task, at the head of a stream chosen by the seed.
#include <Python.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "state.h"

namespace sim {

State& state() {
  static State* made = new State;
  return *made;
}

void take(Lock& lock) {
  if (lock.try_lock()) return;
  PyThreadState* python = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  lock.lock();
  if (python) PyEval_RestoreThread(python);
}

Queue& queue_of(StreamId id) {
  auto& s = state();
  auto& slot = s.queues[id];
  if (!slot) {
    slot = std::make_unique<Queue>();
    slot->id = id;
    slot->index = s.by_index.size();
    slot->rank = s.rng();
    s.by_index.push_back(slot.get());
  }
  return *slot;
}

namespace {

thread_local std::optional<HostTime> own_time;

std::span<Queue*> all_queues() { return std::span(state().by_index).subspan(1); }

bool is_transfer(const std::string& name) { return name.rfind("aten::", 0) != 0 && name != "copy_"; }

// The stream does nothing until ``time``. A kernel that works on what a transfer has brought is named with it.
void idle(Queue& queue, double time, const std::string& cause) {
  if (time <= queue.time) return;
  state().traced.push_back({"wait: " + cause, queue.id.device, queue.id.id, queue.time, time});
  queue.time = time;
  queue.cause = cause;
  auto first = cause.substr(0, cause.find(" > "));
  queue.transfer = is_transfer(first) ? first : "";
}

void charge(Queue& queue, const Task& task) {
  auto& s = state();
  double nbytes = 0;
  for (auto& range : task.ranges) {
    Block* block = block_of(range.lo);
    if (!block || !block->on_host) nbytes += range.hi - range.lo;
  }
  Cost cost = s.costs.count(task.name) ? s.costs[task.name] : s.costs[""];
  auto& host = host_now();
  host.time += s.launch;
  idle(queue, host.time, "host" + (host.cause.empty() ? "" : " after " + host.cause));
  double end = queue.time + cost.fixed + std::max(cost.per_byte * nbytes, cost.per_flop * task.flops);
  s.traced.push_back({task.name, queue.id.device, queue.id.id, queue.time, end});
  queue.time = end;
  queue.cause = is_transfer(task.name) || queue.transfer.empty() ? task.name : queue.transfer + " > " + task.name;
}

void settle(Queue& queue) {  // records, and waits for what has passed, take no time
  while (!queue.items.empty()) {
    Item& head = queue.items.front();
    if (head.kind == Item::RECORD) head.moment->done = true;
    else if (head.kind != Item::WAIT || !head.moment->done) return;
    queue.items.pop_front();
  }
}

void settle_all() {
  for (bool again = true; again;) {
    again = false;
    for (auto* queue : all_queues()) {
      size_t left = queue->items.size();
      settle(*queue);
      again = again || left != queue->items.size();
    }
  }
}

void execute(Queue& queue) {
  auto& s = state();
  Item& head = queue.items.front();
  s.activity++;
  try {
    if (head.kind == Item::RUN) {
      s.statistics.tasks++;
      auto run = std::move(head.run);
      queue.items.pop_front();
      run();
    } else if (!head.issued) {
      head.issued = true;
      s.statistics.exchanges++;
      head.exchange->issue();
    } else {
      auto exchange = std::move(head.exchange);
      queue.items.pop_front();
      exchange->finish();
    }
  } catch (...) {
    if (!s.failure) s.failure = std::current_exception();
  }
  settle_all();
}

std::vector<Queue*> heads(bool with_running_exchanges) {
  settle_all();
  std::vector<Queue*> ready;
  for (auto* queue : all_queues()) {
    if (queue->items.empty() || queue->items.front().kind == Item::WAIT) continue;
    Item& head = queue->items.front();
    bool is_running = head.kind == Item::EXCHANGE && head.issued;
    if (!is_running || with_running_exchanges || head.exchange->poll()) ready.push_back(queue);
  }
  return ready;
}

Queue* choose(const std::vector<Queue*>& ready) {
  auto& s = state();
  if (s.policy == SERIAL) return ready.front();
  if (s.policy == RANDOM) return ready[s.rng() % ready.size()];
  if (s.rng() % 32 == 0) {
    auto queues = all_queues();
    queues[s.rng() % queues.size()]->rank = s.rng();
  }
  return *std::max_element(ready.begin(), ready.end(), [](Queue* a, Queue* b) { return a->rank < b->rank; });
}

// Does one task; false if none can run now.
bool step(Lock& lock) {
  auto& s = state();
  auto ready = heads(s.policy != SERIAL);
  if (ready.empty()) return false;
  Queue* queue = choose(ready);
  Item& head = queue->items.front();
  if (head.kind == Item::EXCHANGE && head.issued && !head.exchange->poll()) {
    // The other ranks, if they chose alike, are on their way: wait a little. Otherwise run something else.
    auto exchange = head.exchange;
    for (int i = 0; i < 200 && !exchange->poll(); i++) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      take(lock);
    }
    if (queue->items.empty() || queue->items.front().exchange != exchange) return true;  // another thread finished it
    if (!exchange->poll()) {
      s.statistics.forced++;
      auto others = heads(false);
      if (others.empty()) return true;
      queue = others[s.rng() % others.size()];
    }
  }
  execute(*queue);
  return true;
}

template <class Done>
void drive(Lock& lock, Done done) {
  settle_all();
  while (!done()) {
    if (step(lock)) continue;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    take(lock);
  }
}

void rethrow() {
  if (state().failure) std::rethrow_exception(std::exchange(state().failure, nullptr));
}

// The device goes on while the host waits for something else, such as another rank that waits for this device.
void start_pump() {
  if (state().pump_started) return;
  state().pump_started = true;
  std::thread([] {
    auto& s = state();
    uint64_t seen = 0;
    while (true) {
      std::this_thread::sleep_for(std::chrono::milliseconds(60));
      auto lock = locked();
      if (s.activity != seen) {
        seen = s.activity;
        continue;
      }
      while (s.activity == seen) {
        auto ready = heads(false);
        if (ready.empty()) break;
        s.statistics.pumped++;
        execute(*choose(ready));
        seen = s.activity;
      }
    }
  }).detach();
}

void issue(StreamId stream, Task task, Item item) {
  std::string where = where_now();
  auto lock = locked();
  start_pump();
  rethrow();
  state().activity++;
  Queue& queue = queue_of(stream);
  note(queue, task.name, task.ranges, where);
  charge(queue, task);
  push(queue, std::move(item));
}

void drop_all() {
  auto& s = state();
  for (auto* queue : all_queues()) {
    for (auto& item : queue->items)
      if (item.kind == Item::RECORD) item.moment->done = true;
    queue->items.clear();
  }
  s.failure = nullptr;
}

void forget_run() {
  auto& s = state();
  s.found.clear();
  s.found_keys.clear();
  s.traced.clear();
  for (auto* queue : all_queues()) queue->time = 0;
  s.host_time = {};
  s.statistics = Stats();
}

}  // namespace

void progress() {
  auto& s = state();
  while (s.policy == SERIAL || (s.eagerness > 0 && s.rng() % 1000 < s.eagerness * 1000)) {
    auto ready = heads(false);
    if (ready.empty()) break;
    execute(*choose(ready));
  }
}

void push(Queue& queue, Item item) {
  queue.items.push_back(std::move(item));
  progress();
}

MomentPtr record_on(Queue& queue) {
  join(queue.clock, state().host_clock);
  auto moment = std::make_shared<Moment>();
  moment->epoch = state().epoch;
  moment->clock = queue.clock;
  moment->time = std::max(queue.time, host_now().time);
  moment->cause = moment->time > queue.time ? "host" : queue.cause;
  queue.items.push_back({Item::RECORD, nullptr, moment, nullptr});
  settle(queue);
  return moment;
}

int device_count() { return state().num_devices; }
void set_device_count(int count) { state().num_devices = count; }

StreamId new_stream(int device, int) {
  auto lock = locked();
  StreamId id{device, state().next_id++};
  queue_of(id);
  return id;
}

void enqueue(StreamId stream, Task task, std::function<void()> run) {
  issue(stream, std::move(task), {Item::RUN, std::move(run), nullptr, nullptr});
}

void enqueue_exchange(StreamId stream, Task task, std::shared_ptr<Exchange> exchange) {
  issue(stream, std::move(task), {Item::EXCHANGE, nullptr, nullptr, std::move(exchange)});
}

MomentPtr record(StreamId stream) {
  auto lock = locked();
  return record_on(queue_of(stream));
}

void wait(StreamId stream, const MomentPtr& moment) {
  if (!moment) return;
  auto lock = locked();
  if (moment->epoch != state().epoch) return;
  Queue& queue = queue_of(stream);
  join(queue.clock, moment->clock);
  idle(queue, moment->time, moment->cause);
  queue.items.push_back({Item::WAIT, nullptr, moment, nullptr});
  settle(queue);
}

bool query(const MomentPtr& moment) {
  if (!moment) return true;
  auto lock = locked();
  auto& s = state();
  settle_all();
  if (s.launch > 0) {  // the answer depends on simulated time, not on the speed of this machine
    if (moment->epoch == s.epoch && moment->time > host_now().time) return false;
    drive(lock, [&] { return moment->done; });
  }
  if (!moment->done && s.policy != SERIAL && s.rng() % 2) step(lock);
  if (s.policy == SERIAL) progress();
  if (moment->done) host_saw(*moment);
  return moment->done;
}

bool has_passed(const MomentPtr& moment) {
  auto lock = locked();
  return moment->done;
}

bool query_stream(StreamId stream) { return query(record(stream)); }

void synchronize(const MomentPtr& moment) {
  if (!moment) return;
  auto lock = locked();
  auto& s = state();
  s.statistics.syncs++;
  drive(lock, [&] { return moment->done; });
  host_saw(*moment);
  if (moment->epoch == s.epoch && moment->time > host_now().time) host_now() = {moment->time, moment->cause};
  rethrow();
}

void synchronize_stream(StreamId stream) { synchronize(record(stream)); }

void synchronize_device(int device) {
  auto lock = locked();
  auto& s = state();
  s.statistics.syncs++;
  auto is_of = [&](Queue* queue) { return device < 0 || queue->id.device == device; };
  drive(lock, [&] {
    auto queues = all_queues();
    return std::all_of(queues.begin(), queues.end(), [&](Queue* queue) { return !is_of(queue) || queue->items.empty(); });
  });
  for (auto* queue : all_queues()) {
    if (!is_of(queue)) continue;
    join(s.host_clock, queue->clock);
    if (queue->time > host_now().time) host_now() = {queue->time, queue->cause};
  }
  rethrow();
}

void configure(int64_t seed, double eagerness, const std::string& policy) {
  synchronize_device(-1);
  auto lock = locked();
  auto& s = state();
  s.rng.seed(seed);
  s.eagerness = eagerness;
  s.policy = policy == "serial" ? SERIAL : policy == "random" ? RANDOM : PRIORITY;
  for (auto* queue : all_queues()) queue->rank = s.rng();
}

void set_checks(bool races, bool raises, bool host) {
  auto lock = locked();
  state().checks_races = races;
  state().raises = raises;
  state().checks_host = host;
}

void set_cost(const std::string& name, double fixed, double per_byte, double per_flop) {
  auto lock = locked();
  state().costs[name] = {fixed, per_byte, per_flop};
}

void set_stack_provider(std::function<std::string()> provider) { state().stack_provider = std::move(provider); }

void reset() {
  synchronize_device(-1);
  auto lock = locked();
  forget_run();
}

void restart() {
  auto lock = locked();
  auto& s = state();
  drop_all();
  forget_run();
  s.epoch++;
  s.queues.clear();
  s.by_index.assign(1, nullptr);
  s.host_clock.assign(1, 0);
  s.costs.clear();
  s.launch = 0;
  for (auto& each : s.leaving) (each.block->on_host ? s.pinned_pool : s.pools[each.block->stream]).push_back(each.block);
  s.leaving.clear();
  auto drop = [&](std::vector<Block*>& pool) {
    for (auto* block : pool) {
      s.blocks.erase(block->ptr);
      std::free(block->ptr);
      delete block;
    }
    pool.clear();
  };
  for (auto& pool : s.pools) drop(pool.second);
  s.pools.clear();
  s.num_pinned -= s.pinned_pool.size();
  drop(s.pinned_pool);
  for (auto& block : s.blocks) {
    block.second->accesses.clear();
    block.second->uses.clear();
  }
}

HostTime& host_now() { return own_time ? *own_time : state().host_time; }

void set_launch(double seconds) {
  auto lock = locked();
  state().launch = seconds;
}

double host_time() {
  auto lock = locked();
  return host_now().time;
}

void reach_host_time(double time) {
  auto lock = locked();
  if (time > host_now().time) host_now() = {time, "the host's own work"};
}

void own_host_time(double time) { own_time = HostTime{time, ""}; }

double drop_host_time() { return std::exchange(own_time, std::nullopt)->time; }

double makespan() {
  auto lock = locked();
  double last = 0;
  for (auto* queue : all_queues()) last = std::max(last, queue->time);
  return last;
}

std::vector<Traced> trace() {
  auto lock = locked();
  return state().traced;
}

Stats& stats() { return state().statistics; }

}  // namespace sim
