#include "runtime.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace sim {
namespace {

struct Item {
  enum Kind { RUN, RECORD, WAIT, EXCHANGE } kind;
  std::string name;
  std::function<void()> run;
  MomentPtr moment;
  std::shared_ptr<Exchange> exchange;
  bool issued = false;
};

struct Queue {
  StreamId id;
  size_t index;
  int priority;
  std::deque<Item> items;
  Clock clock;
  double time = 0;
  uint64_t rank = 0;  // of the policy "priority"
};

struct Access {
  const char *lo, *hi;
  bool write;
  size_t stream;
  uint64_t at;
  std::string name, where;
};

struct Block {
  char* ptr;
  size_t size, asked;
  StreamId stream;
  bool live;
  std::vector<Access> accesses;
  std::set<std::pair<int, int64_t>> uses;
};

struct Leaving {  // freed, but used on other streams: kept until those have passed
  Block* block;
  std::vector<MomentPtr> moments;
};

std::mutex mutex;
std::condition_variable changed;
int num_devices = 2;
int64_t next_id = 1;
std::map<std::pair<int, int64_t>, std::unique_ptr<Queue>> queues;
std::vector<Queue*> by_index;
std::map<const char*, Block*> blocks;  // all that were ever made, by address
std::map<std::pair<int, int64_t>, std::vector<Block*>> pools;
std::vector<Leaving> leaving;
std::map<const char*, size_t> pinned;
Clock host_clock;
double host_time = 0;
std::mt19937_64 rng(0);
double eagerness = 0;
enum Policy { SERIAL, RANDOM, PRIORITY } policy = SERIAL;
bool checks_races = true, raises = false;
std::map<std::string, double> factors;
std::function<std::string()> stack_provider;
std::vector<std::string> found;
std::set<std::string> found_keys;
std::vector<Traced> traced;
std::vector<size_t> in_use(16, 0), at_most(16, 0);
Stats statistics;
std::exception_ptr failure;
uint64_t activity = 0;
bool pump_started = false;

Queue& queue_of(StreamId id) {
  auto& slot = queues[{id.device, id.id}];
  if (!slot) {
    slot = std::make_unique<Queue>();
    slot->id = id;
    slot->index = by_index.size();
    slot->priority = 0;
    slot->rank = rng();
    by_index.push_back(slot.get());
  }
  return *slot;
}

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

bool before(const Access& access, const Clock& clock) {
  return access.stream < clock.size() && clock[access.stream] >= access.at;
}

Block* block_of(const char* address) {
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return nullptr;
  Block* block = std::prev(it)->second;
  return address < block->ptr + block->size ? block : nullptr;
}

std::string text(const Access& access) {
  auto& id = by_index[access.stream]->id;
  return std::string(access.write ? "write" : "read") + " by `" + access.name + "` on stream " + std::to_string(id.device) +
      ":" + std::to_string(id.id) + (access.where.empty() ? "" : " at\n" + access.where);
}

void report(const std::string& key, const std::string& message) {
  if (found_keys.insert(key).second) found.push_back(message);
  TORCH_CHECK(!raises, message);
}

// Notes what a task will touch, and says so if that is not ordered after what others of other streams do there.
void note(Queue& queue, const std::string& name, const std::vector<Range>& ranges, const std::string& where) {
  join(queue.clock, host_clock);
  if (queue.clock.size() <= queue.index) queue.clock.resize(queue.index + 1);
  uint64_t at = ++queue.clock[queue.index];
  for (auto& range : ranges) {
    if (range.lo == range.hi) continue;
    Block* block = block_of(range.lo);
    Access own{range.lo, range.hi, range.write, queue.index, at, name, where};
    if (!block || !block->live) {
      if (checks_races) report("freed " + name, "memory that is not allocated: " + text(own));
      continue;
    }
    if (!checks_races) continue;
    auto& known = block->accesses;
    for (auto& other : known) {
      if (other.hi <= own.lo || own.hi <= other.lo || !(other.write || own.write)) continue;
      if (other.stream != own.stream && !before(other, queue.clock))
        report(other.name + ">" + own.name + other.where + own.where, "unordered: " + text(own) + "\n    after " + text(other));
    }
    // What is ordered before this and lies inside of it says nothing more, unless this only reads what that wrote.
    known.erase(std::remove_if(known.begin(), known.end(), [&](const Access& other) {
      bool inside = own.lo <= other.lo && other.hi <= own.hi;
      return inside && (own.write || !other.write) && (other.stream == own.stream || before(other, queue.clock));
    }), known.end());
    known.push_back(std::move(own));
  }
}

void charge(Queue& queue, const std::string& name, const std::vector<Range>& ranges) {
  double cost = 0;
  for (auto& range : ranges) cost += range.hi - range.lo;
  auto factor = factors.find(name);
  cost *= factor == factors.end() ? 1.0 : factor->second;
  queue.time = std::max(queue.time, host_time);
  traced.push_back({name, queue.id.device, queue.id.id, queue.time, queue.time + cost});
  queue.time += cost;
}

// ---- the scheduler; all below is called with the lock held

void settle(Queue& queue) {  // what takes no time is done at once
  while (!queue.items.empty()) {
    Item& head = queue.items.front();
    if (head.kind == Item::RECORD) head.moment->done = true;
    else if (head.kind != Item::WAIT || !head.moment->done) return;
    queue.items.pop_front();
  }
}

void settle_all() {
  for (size_t again = 1; again;) {
    again = 0;
    for (auto* queue : by_index) {
      size_t left = queue->items.size();
      settle(*queue);
      again += left - queue->items.size();
    }
  }
}

void execute(Queue& queue) {
  Item& head = queue.items.front();
  activity++;
  try {
    if (head.kind == Item::RUN) {
      statistics.tasks++;
      auto run = std::move(head.run);
      queue.items.pop_front();
      run();
    } else if (!head.issued) {
      head.issued = true;
      statistics.exchanges++;
      head.exchange->issue();
    } else {
      auto exchange = std::move(head.exchange);
      queue.items.pop_front();
      exchange->finish();
    }
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  settle_all();
}

std::vector<Queue*> heads(bool with_exchanges) {
  settle_all();
  std::vector<Queue*> ready;
  for (auto* queue : by_index) {
    if (queue->items.empty() || queue->items.front().kind == Item::WAIT) continue;
    Item& head = queue->items.front();
    if (head.kind == Item::EXCHANGE && head.issued && !with_exchanges && !head.exchange->poll()) continue;
    ready.push_back(queue);
  }
  return ready;
}

Queue* choose(const std::vector<Queue*>& ready) {
  if (policy == SERIAL) return ready.front();
  if (policy == RANDOM) return ready[rng() % ready.size()];
  if (rng() % 32 == 0) by_index[rng() % by_index.size()]->rank = rng();
  return *std::max_element(ready.begin(), ready.end(), [](Queue* a, Queue* b) { return a->rank < b->rank; });
}

// One task, whichever comes; false if there was none that could run now.
bool step(std::unique_lock<std::mutex>& lock) {
  auto ready = heads(policy != SERIAL);
  if (ready.empty()) return false;
  Queue* queue = choose(ready);
  Item& head = queue->items.front();
  if (head.kind == Item::EXCHANGE && head.issued && !head.exchange->poll()) {
    // The same choice on all ranks finds the others on their way; else let something else run meanwhile.
    auto exchange = head.exchange;
    for (int i = 0; i < 200 && !exchange->poll(); i++) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      lock.lock();
    }
    if (queue->items.empty() || queue->items.front().exchange != exchange) return true;
    if (!exchange->poll()) {
      statistics.forced++;
      auto others = heads(false);
      if (others.empty()) return true;
      queue = others[rng() % others.size()];
    }
  }
  execute(*queue);
  changed.notify_all();
  return true;
}

template <class Done>
void drive(std::unique_lock<std::mutex>& lock, Done done) {
  settle_all();
  while (!done()) {
    if (!step(lock)) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      lock.lock();
    }
  }
}

void rethrow() {
  if (failure) {
    auto error = failure;
    failure = nullptr;
    std::rethrow_exception(error);
  }
}

void progress(std::unique_lock<std::mutex>& lock) {
  if (policy == SERIAL) {
    while (true) {
      auto ready = heads(false);
      if (ready.empty()) break;
      execute(*ready.front());
    }
    return;
  }
  while (eagerness > 0 && (rng() % 1000) < eagerness * 1000) {
    auto ready = heads(false);
    if (ready.empty()) break;
    execute(*choose(ready));
  }
}

void start_pump() {
  if (pump_started) return;
  pump_started = true;
  // The device goes on while the host waits for other ranks: without this they would wait for each other for ever.
  std::thread([] {
    uint64_t seen = 0;
    while (true) {
      std::this_thread::sleep_for(std::chrono::milliseconds(60));
      std::unique_lock<std::mutex> lock(mutex);
      if (activity != seen) {
        seen = activity;
        continue;
      }
      while (activity == seen) {
        auto ready = heads(false);
        if (ready.empty()) break;
        statistics.pumped++;
        execute(*choose(ready));
        seen = activity;
      }
    }
  }).detach();
}

std::string where_now() { return stack_provider ? stack_provider() : ""; }

}  // namespace

int device_count() { return num_devices; }
void set_device_count(int count) { num_devices = count; }

StreamId new_stream(int device, int priority) {
  std::unique_lock<std::mutex> lock(mutex);
  StreamId id{device, next_id++};
  queue_of(id).priority = priority;
  return id;
}

void enqueue(StreamId stream, const std::string& name, std::function<void()> run, std::vector<Range> ranges) {
  std::string where = where_now();
  std::unique_lock<std::mutex> lock(mutex);
  start_pump();
  rethrow();
  activity++;
  Queue& queue = queue_of(stream);
  note(queue, name, ranges, where);
  charge(queue, name, ranges);
  queue.items.push_back({Item::RUN, name, std::move(run), nullptr, nullptr});
  progress(lock);
}

void enqueue_exchange(StreamId stream, const std::string& name, std::shared_ptr<Exchange> exchange, std::vector<Range> ranges) {
  std::string where = where_now();
  std::unique_lock<std::mutex> lock(mutex);
  start_pump();
  rethrow();
  activity++;
  Queue& queue = queue_of(stream);
  note(queue, name, ranges, where);
  charge(queue, name, ranges);
  queue.items.push_back({Item::EXCHANGE, name, nullptr, nullptr, std::move(exchange)});
  progress(lock);
}

MomentPtr record(StreamId stream) {
  std::unique_lock<std::mutex> lock(mutex);
  Queue& queue = queue_of(stream);
  join(queue.clock, host_clock);
  auto moment = std::make_shared<Moment>();
  moment->clock = queue.clock;
  moment->time = queue.time;
  queue.items.push_back({Item::RECORD, "record", nullptr, moment, nullptr});
  settle(queue);
  return moment;
}

void wait(StreamId stream, const MomentPtr& moment) {
  if (!moment) return;
  std::unique_lock<std::mutex> lock(mutex);
  Queue& queue = queue_of(stream);
  join(queue.clock, moment->clock);
  queue.time = std::max(queue.time, moment->time);
  queue.items.push_back({Item::WAIT, "wait", nullptr, moment, nullptr});
  settle(queue);
}

static void host_saw(const Clock& clock, double time) {
  join(host_clock, clock);
  host_time = std::max(host_time, time);
}

bool query(const MomentPtr& moment) {
  if (!moment) return true;
  std::unique_lock<std::mutex> lock(mutex);
  settle_all();
  if (!moment->done && policy != SERIAL && rng() % 2) step(lock);
  if (policy == SERIAL) progress(lock);
  if (moment->done) host_saw(moment->clock, 0);
  return moment->done;
}

bool query_stream(StreamId stream) { return query(record(stream)); }

void synchronize(const MomentPtr& moment) {
  if (!moment) return;
  std::unique_lock<std::mutex> lock(mutex);
  statistics.syncs++;
  drive(lock, [&] { return moment->done; });
  host_saw(moment->clock, moment->time);
  rethrow();
}

void synchronize_stream(StreamId stream) { synchronize(record(stream)); }

void synchronize_device(int device) {
  std::unique_lock<std::mutex> lock(mutex);
  statistics.syncs++;
  auto idle = [&] {
    return std::all_of(by_index.begin(), by_index.end(), [&](Queue* queue) {
      return (device >= 0 && queue->id.device != device) || queue->items.empty();
    });
  };
  drive(lock, idle);
  for (auto* queue : by_index)
    if (device < 0 || queue->id.device == device) host_saw(queue->clock, queue->time);
  rethrow();
}

void run_alone(StreamId stream, const std::string& name, std::vector<Range> ranges, std::function<void()> run) {
  enqueue(stream, name, std::move(run), std::move(ranges));
  synchronize_stream(stream);
}

// ---- memory

void* allocate(size_t nbytes, StreamId stream) {
  if (!nbytes) return nullptr;
  std::string where = where_now();
  std::unique_lock<std::mutex> lock(mutex);
  for (size_t i = 0; i < leaving.size();) {
    auto& each = leaving[i];
    if (std::all_of(each.moments.begin(), each.moments.end(), [](auto& moment) { return moment->done; })) {
      for (auto& moment : each.moments) host_saw(moment->clock, 0);
      pools[{each.block->stream.device, each.block->stream.id}].push_back(each.block);
      leaving.erase(leaving.begin() + i);
    } else {
      i++;
    }
  }
  auto& pool = pools[{stream.device, stream.id}];
  Block* block = nullptr;
  for (size_t i = pool.size(); i-- > 0;) {  // what was freed last, if it is large enough
    if (pool[i]->size >= nbytes) {
      block = pool[i];
      pool.erase(pool.begin() + i);
      statistics.reused++;
      break;
    }
  }
  if (!block) {
    size_t size = (nbytes + 511) / 512 * 512;
    block = new Block{static_cast<char*>(std::aligned_alloc(512, size)), size, nbytes, stream, true, {}, {}};
    blocks[block->ptr] = block;
  }
  block->live = true;
  block->asked = nbytes;
  in_use[stream.device] += nbytes;
  at_most[stream.device] = std::max(at_most[stream.device], in_use[stream.device]);
  Queue& queue = queue_of(stream);
  std::vector<Range> all{{block->ptr, block->ptr + block->size, true}};
  note(queue, "allocate", all, where);
  char* ptr = block->ptr;
  size_t size = block->size;
  queue.items.push_back({Item::RUN, "allocate", [ptr, size] { std::memset(ptr, 0xff, size); }, nullptr, nullptr});  // NaN
  progress(lock);
  return ptr;
}

void release(void* ptr) {
  if (!ptr) return;
  std::unique_lock<std::mutex> lock(mutex);
  Block* block = block_of(static_cast<char*>(ptr));
  block->live = false;
  in_use[block->stream.device] -= block->asked;
  if (block->uses.empty()) {
    pools[{block->stream.device, block->stream.id}].push_back(block);
    return;
  }
  Leaving gone{block, {}};
  for (auto& use : block->uses) {
    Queue& queue = queue_of({use.first, use.second});
    auto moment = std::make_shared<Moment>();
    moment->clock = queue.clock;
    queue.items.push_back({Item::RECORD, "record", nullptr, moment, nullptr});
    gone.moments.push_back(moment);
  }
  block->uses.clear();
  leaving.push_back(std::move(gone));
}

void record_stream(void* ptr, StreamId stream) {
  std::unique_lock<std::mutex> lock(mutex);
  Block* block = ptr ? block_of(static_cast<char*>(ptr)) : nullptr;
  if (block && (block->stream.device != stream.device || block->stream.id != stream.id))
    block->uses.insert({stream.device, stream.id});
}

int device_of(const void* ptr) {
  std::unique_lock<std::mutex> lock(mutex);
  Block* block = block_of(static_cast<const char*>(ptr));
  return block ? block->stream.device : 0;
}

size_t allocated(int device) { return in_use[device]; }
size_t peak(int device) { return at_most[device]; }
void reset_peak(int device) { at_most[device] = in_use[device]; }

void pin(void* ptr, size_t nbytes) {
  std::unique_lock<std::mutex> lock(mutex);
  pinned[static_cast<char*>(ptr)] = nbytes;
}

bool unpin(void* ptr) {
  std::unique_lock<std::mutex> lock(mutex);
  return pinned.erase(static_cast<char*>(ptr)) > 0;
}

bool is_pinned(const void* ptr) {
  std::unique_lock<std::mutex> lock(mutex);
  auto it = pinned.upper_bound(static_cast<const char*>(ptr));
  if (it == pinned.begin()) return false;
  --it;
  return static_cast<const char*>(ptr) < it->first + it->second;
}

// ---- settings, results

void configure(int64_t seed, double eager, const std::string& how) {
  synchronize_device(-1);
  std::unique_lock<std::mutex> lock(mutex);
  rng.seed(seed);
  eagerness = eager;
  policy = how == "serial" ? SERIAL : how == "random" ? RANDOM : PRIORITY;
  for (auto* queue : by_index) queue->rank = rng();
}

void set_checks(bool races, bool raise) {
  checks_races = races;
  raises = raise;
}
void set_factor(const std::string& name, double factor) { factors[name] = factor; }
void set_stack_provider(std::function<std::string()> provider) { stack_provider = std::move(provider); }
std::vector<std::string> races() {
  std::unique_lock<std::mutex> lock(mutex);
  return found;
}
void discard() {
  std::unique_lock<std::mutex> lock(mutex);
  for (auto* queue : by_index) {
    for (auto& item : queue->items)
      if (item.moment && item.kind == Item::RECORD) item.moment->done = true;
    queue->items.clear();
  }
  failure = nullptr;
}
void reset() {
  synchronize_device(-1);
  std::unique_lock<std::mutex> lock(mutex);
  found.clear();
  found_keys.clear();
  traced.clear();
  for (auto* queue : by_index) queue->time = 0;
  host_time = 0;
  statistics = Stats();
}
double makespan() {
  std::unique_lock<std::mutex> lock(mutex);
  double last = 0;
  for (auto* queue : by_index) last = std::max(last, queue->time);
  return last;
}
std::vector<Traced> trace() {
  std::unique_lock<std::mutex> lock(mutex);
  return traced;
}
Stats& stats() { return statistics; }

}  // namespace sim
