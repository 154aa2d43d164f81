// A simulated asynchronous accelerator: streams, events, memory. No torch in here but c10::Error.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>;  // by stream: how many tasks of it have surely been done before

struct Moment {  // what a recorded event stands for
  bool done = false;
  Clock clock;
  double time = 0;  // simulated
};
using MomentPtr = std::shared_ptr<Moment>;

struct Range {
  const char* lo;
  const char* hi;
  bool write;
};

struct Exchange {  // a collective: issued, polled, finished; never waited for under the lock
  std::function<void()> issue;
  std::function<bool()> poll;
  std::function<void()> finish;
};

struct StreamId {
  int device;
  int64_t id;
};

int device_count();
void set_device_count(int count);
StreamId new_stream(int device, int priority);

void enqueue(StreamId stream, const std::string& name, std::function<void()> run, std::vector<Range> ranges);
void enqueue_exchange(StreamId stream, const std::string& name, std::shared_ptr<Exchange> exchange, std::vector<Range> ranges);
MomentPtr record(StreamId stream);
void wait(StreamId stream, const MomentPtr& moment);

bool query(const MomentPtr& moment);
bool query_stream(StreamId stream);
void synchronize(const MomentPtr& moment);
void synchronize_stream(StreamId stream);
void synchronize_device(int device);  // -1: all
void run_alone(StreamId stream, const std::string& name, std::vector<Range> ranges, std::function<void()> run);

void* allocate(size_t nbytes, StreamId stream);
void release(void* ptr);
void record_stream(void* ptr, StreamId stream);
int device_of(const void* ptr);
size_t allocated(int device);
size_t peak(int device);
void reset_peak(int device);

void pin(void* ptr, size_t nbytes);
bool unpin(void* ptr);
bool is_pinned(const void* ptr);

// What a run is told to do, and what it has seen.
void configure(int64_t seed, double eagerness, const std::string& policy);  // policy: serial, random, priority
void set_checks(bool races, bool raise);
void set_factor(const std::string& name, double factor);
void set_stack_provider(std::function<std::string()> provider);
std::vector<std::string> races();
void discard();  // work that is still queued, without doing it
void reset();
double makespan();
struct Traced {
  std::string name;
  int device;
  int64_t stream;
  double start, end;
};
std::vector<Traced> trace();
struct Stats {
  uint64_t tasks = 0, syncs = 0, pageable = 0, host_casts = 0, exchanges = 0, pumped = 0, forced = 0, reused = 0;
};
Stats& stats();

}  // namespace sim
