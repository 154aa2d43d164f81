// Races: any two accesses to the same bytes, one of them a write, that no wait orders.
//
// Each task of a stream and each access by the host has a place in a vector clock. A stream's clock joins that of every
// event that it waits for and, at each task, the host's; the host's joins that of every event that it has seen pass.
#include <c10/util/Exception.h>

#include <algorithm>

#include "state.h"

namespace sim {

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

bool before(const Access& access, const Clock& clock) {
  return access.stream < clock.size() && clock[access.stream] >= access.at;
}

namespace {

std::string text(const Access& access) {
  std::string result = std::string(access.write ? "write" : "read") + " by `" + access.name + "` ";
  if (access.stream == HOST) {
    result += "on the host";
  } else {
    auto& id = state().by_index[access.stream]->id;
    result += "on stream " + std::to_string(id.device) + ":" + std::to_string(id.id);
  }
  return result + (access.where.empty() ? "" : " at\n" + access.where);
}

void report(const std::string& key, const std::string& message) {
  auto& s = state();
  if (s.found_keys.insert(key).second) s.found.push_back(message);
  TORCH_CHECK(!s.raises, message);
}

// Reports what of `block` is not ordered before `own`; `clock` is what `own` is ordered after.
void compare(Block& block, const Access& own, const Clock& clock) {
  for (auto& other : block.accesses) {
    if (other.hi <= own.lo || own.hi <= other.lo || !(other.write || own.write)) continue;
    if (other.stream == own.stream || before(other, clock)) continue;
    report(other.name + ">" + own.name + other.where + own.where, "unordered: " + text(own) + "\n    after " + text(other));
  }
}

// An earlier access inside of `own` and ordered before it adds nothing any more, unless it wrote and `own` reads.
void keep(Block& block, Access own, const Clock& clock) {
  auto& known = block.accesses;
  known.erase(
      std::remove_if(
          known.begin(), known.end(),
          [&](const Access& other) {
            bool is_inside = own.lo <= other.lo && other.hi <= own.hi;
            return is_inside && (own.write || !other.write) && (other.stream == own.stream || before(other, clock));
          }),
      known.end());
  known.push_back(std::move(own));
}

}  // namespace

void note(Queue& queue, const std::string& name, const std::vector<Range>& ranges, const std::string& where) {
  auto& s = state();
  join(queue.clock, s.host_clock);
  if (queue.clock.size() <= queue.index) queue.clock.resize(queue.index + 1);
  uint64_t at = ++queue.clock[queue.index];
  if (!s.checks_races) return;
  for (auto& range : ranges) {
    if (range.lo == range.hi) continue;
    Block* block = block_of(range.lo);
    Access own{range.lo, range.hi, range.write, queue.index, at, name, where};
    if (!block || !block->live) {
      report("freed " + name + where, "memory that is not allocated: " + text(own));
      continue;
    }
    compare(*block, own, queue.clock);
    keep(*block, std::move(own), queue.clock);
  }
}

// The device's tasks are ordered after every access that the host has made by the time it issues them, so the host's
// accesses need not be kept: each race of the two shows when the host comes second.
void touch_on_host(const std::string& name, const std::vector<Range>& ranges) {
  auto& s = state();
  if (!s.checks_host) return;
  std::string where = where_now();
  auto lock = locked();
  if (!s.checks_races) return;
  s.statistics.host_accesses++;
  for (auto& range : ranges) {
    Block* block = block_of(range.lo);
    if (block && block->on_host)
      compare(*block, Access{range.lo, range.hi, range.write, HOST, 0, name, where}, s.host_clock);
  }
}

void check_unused(Block& block, const std::string& name, const std::string& where) {
  if (state().checks_races)
    compare(block, Access{block.ptr, block.ptr + block.size, true, HOST, 0, name, where}, state().host_clock);
}

void host_saw(const Moment& moment) {
  if (moment.epoch == state().epoch) join(state().host_clock, moment.clock);
}

// That memory was free to reuse says nothing about the order of anything else, so only its own accesses are forgotten.
void forget_passed(Leaving& leaving) {
  auto& known = leaving.block->accesses;
  known.erase(
      std::remove_if(
          known.begin(), known.end(),
          [&](const Access& access) {
            return std::any_of(leaving.moments.begin(), leaving.moments.end(), [&](auto& moment) {
              return before(access, moment->clock);
            });
          }),
      known.end());
}

std::vector<std::string> races() {
  auto lock = locked();
  return state().found;
}

}  // namespace sim
