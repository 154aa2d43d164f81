// The simulator's whole state, shared by scheduler.cpp, races.cpp and memory.cpp; all of it is under one lock.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "runtime.h"

namespace sim {

constexpr size_t HOST = 0;  // the host's place in every clock

struct Item {
  enum Kind { RUN, RECORD, WAIT, EXCHANGE } kind;
  std::function<void()> run;
  MomentPtr moment;
  std::shared_ptr<Exchange> exchange;
  bool issued = false;
};

struct Queue {
  StreamId id;
  size_t index;  // in clocks
  std::deque<Item> items;
  Clock clock;
  double time = 0;
  std::string cause;     // the task that determined the time
  std::string transfer;  // the collective or copy that brought what the stream works on, if any
  uint64_t rank = 0;  // of the policy "priority"
};

struct Access {
  const char *lo, *hi;
  bool write;
  size_t stream;
  uint64_t at;  // the how-manieth task of its stream
  std::string name, where;
};

struct Block {
  char* ptr;
  size_t size, asked;
  StreamId stream;
  bool live, on_host;
  std::vector<Access> accesses;
  std::set<StreamId> uses;  // by record_stream
};

struct Leaving {  // freed, but other streams use it: reused when those moments have passed
  Block* block;
  std::vector<MomentPtr> moments;
};

struct Cost {
  double fixed = 0, per_byte = 1, per_flop = 0;
};

struct HostTime {
  double time = 0;
  std::string cause;  // what the host waited for last
};

enum Policy { SERIAL, RANDOM, PRIORITY };

struct State {
  std::mutex mutex;
  int num_devices = 1;
  int64_t next_id = 1;
  uint64_t epoch = 0;  // moments of an earlier epoch order nothing: all work of that epoch is gone
  std::map<StreamId, std::unique_ptr<Queue>> queues;
  std::vector<Queue*> by_index{nullptr};
  std::map<const char*, Block*> blocks;
  std::map<StreamId, std::vector<Block*>> pools;
  std::vector<Block*> pinned_pool;
  std::vector<Leaving> leaving;
  size_t num_pinned = 0;
  Clock host_clock{0};
  HostTime host_time;
  double launch = 0;
  std::mt19937_64 rng{0};
  double eagerness = 0;
  Policy policy = SERIAL;
  bool checks_races = true, checks_host = true, raises = false;
  std::map<std::string, Cost> costs;
  std::function<std::string()> stack_provider;
  std::vector<std::string> found;
  std::set<std::string> found_keys;
  std::vector<Traced> traced;
  std::vector<size_t> in_use = std::vector<size_t>(16, 0), at_most = std::vector<size_t>(16, 0);
  Stats statistics;
  std::exception_ptr failure;
  uint64_t activity = 0;
  bool pump_started = false;
};

State& state();  // never destroyed: tensors may outlive the statics of this library
using Lock = std::unique_lock<std::mutex>;
// Nobody waits for the lock while holding Python's: a task may need Python's, to save its thread's state.
void take(Lock& lock);
inline Lock locked() {
  Lock lock(state().mutex, std::defer_lock);
  take(lock);
  return lock;
}
inline std::string where_now() { return state().stack_provider ? state().stack_provider() : ""; }  // before the lock

// Below, the lock is held.

HostTime& host_now();  // of the calling thread

Queue& queue_of(StreamId id);
void progress();
void push(Queue& queue, Item item);
MomentPtr record_on(Queue& queue);

void join(Clock& into, const Clock& other);
bool before(const Access& access, const Clock& clock);
Block* block_of(const char* address);
void note(Queue& queue, const std::string& name, const std::vector<Range>& ranges, const std::string& where);
void check_unused(Block& block, const std::string& name, const std::string& where);
void host_saw(const Moment& moment);
void forget_passed(Leaving& leaving);

}  // namespace sim
