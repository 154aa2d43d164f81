// A simulated asynchronous accelerator: streams, events, memory, clocks. Nothing of torch in here but its errors.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim {

// A vector clock: for each stream, how many of its tasks have certainly ended.
using Clock = std::vector<uint64_t>;

struct Moment {  // of a stream; an event holds the one that it recorded last
  bool done = false;
  uint64_t epoch = 0;
  Clock clock;
  double time = 0;    // simulated
  std::string cause;  // what determined the time
};
using MomentPtr = std::shared_ptr<Moment>;

struct Range {  // bytes that a task reads or writes
  const char* lo;
  const char* hi;
  bool write;
};

struct Task {
  std::string name;
  std::vector<Range> ranges;
  double flops = 0;
};

struct Exchange {  // a collective: issued, polled, finished; the scheduler never waits for it while it is locked
  std::function<void()> issue;
  std::function<bool()> poll;
  std::function<void()> finish;
};

struct StreamId {
  int device;
  int64_t id;
  bool operator<(const StreamId& other) const {
    return device != other.device ? device < other.device : id < other.id;
  }
  bool operator==(const StreamId& other) const { return device == other.device && id == other.id; }
};

// ---- streams and events

int device_count();
void set_device_count(int count);
StreamId new_stream(int device, int priority);
void enqueue(StreamId stream, Task task, std::function<void()> run);
void enqueue_exchange(StreamId stream, Task task, std::shared_ptr<Exchange> exchange);
MomentPtr record(StreamId stream);
void wait(StreamId stream, const MomentPtr& moment);
bool query(const MomentPtr& moment);
bool has_passed(const MomentPtr& moment);  // without the host seeing it
bool query_stream(StreamId stream);
void synchronize(const MomentPtr& moment);
void synchronize_stream(StreamId stream);
void synchronize_device(int device);  // -1: all

// ---- memory of the devices, with the caching allocator's rules

void* allocate(size_t nbytes, StreamId stream);
void release(void* ptr);
void record_stream(void* ptr, StreamId stream);
int device_of(const void* ptr);
size_t allocated(int device);
size_t peak(int device);
void reset_peak(int device);

// ---- pinned memory of the host

void* allocate_pinned(size_t nbytes);
void release_pinned(void* ptr);  // reused when the device is done with it, as torch's allocator does
void pin(void* ptr, size_t nbytes);  // the caller's own memory
bool unpin(void* ptr);
bool is_pinned(const void* ptr);
bool has_pinned();
void touch_on_host(const std::string& name, const std::vector<Range>& ranges);

// ---- a run: its order, its costs, what it showed

void configure(int64_t seed, double eagerness, const std::string& policy);  // serial, random, priority
void set_checks(bool races, bool raises, bool host);
void set_cost(const std::string& name, double fixed, double per_byte, double per_flop);
void set_stack_provider(std::function<std::string()> provider);
void reset();    // finishes all work, forgets races, statistics and simulated time
void restart();  // drops all work, and forgets also every stream and every access
std::vector<std::string> races();

// ---- simulated time

double makespan();
void set_launch(double seconds);  // the host's time to issue one task
double host_time();
void reach_host_time(double time);  // the host is busy until then
void own_host_time(double time);    // this thread has a clock of its own from now on
double drop_host_time();            // and no longer; returns the time that it shows

struct Traced {
  std::string name;
  int device;
  int64_t stream;
  double start, end;
};
std::vector<Traced> trace();

struct Stats {
  uint64_t tasks = 0, syncs = 0, pageable = 0, host_casts = 0, exchanges = 0, pumped = 0, forced = 0, reused = 0;
  uint64_t host_accesses = 0;
};
Stats& stats();

}  // namespace sim
