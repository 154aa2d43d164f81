// Memory: the devices' with the caching allocator's rules, and the host's pinned memory.
//
// A freed block goes to the pool of the stream that it was allocated on and is handed out at once, the last one first,
// if it is large enough; new memory is filled with NaN in that stream's order. So what another stream still reads is
// overwritten, unless record_stream was called.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "state.h"

namespace sim {
namespace {

bool have_passed(const Leaving& leaving) {
  return std::all_of(leaving.moments.begin(), leaving.moments.end(), [](auto& moment) { return moment->done; });
}

void collect() {
  auto& s = state();
  for (size_t i = 0; i < s.leaving.size();) {
    auto& each = s.leaving[i];
    if (!have_passed(each)) {
      i++;
      continue;
    }
    forget_passed(each);
    (each.block->on_host ? s.pinned_pool : s.pools[each.block->stream]).push_back(each.block);
    s.leaving.erase(s.leaving.begin() + i);
  }
}

Block* taken(std::vector<Block*>& pool, size_t nbytes) {
  for (size_t i = pool.size(); i-- > 0;) {
    if (pool[i]->size < nbytes) continue;
    Block* block = pool[i];
    pool.erase(pool.begin() + i);
    state().statistics.reused++;
    return block;
  }
  return nullptr;
}

Block* made(size_t nbytes, StreamId stream, bool on_host) {
  size_t size = (nbytes + 511) / 512 * 512;
  auto* block = new Block{static_cast<char*>(std::aligned_alloc(512, size)), size, nbytes, stream, true, on_host, {}, {}};
  state().blocks[block->ptr] = block;
  return block;
}

void leave(Block* block, const std::set<StreamId>& streams) {
  Leaving gone{block, {}};
  for (auto& stream : streams) gone.moments.push_back(record_on(queue_of(stream)));
  state().leaving.push_back(std::move(gone));
}

}  // namespace

Block* block_of(const char* address) {
  auto& blocks = state().blocks;
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return nullptr;
  Block* block = std::prev(it)->second;
  return address < block->ptr + block->size ? block : nullptr;
}

void* allocate(size_t nbytes, StreamId stream) {
  if (!nbytes) return nullptr;
  std::string where = where_now();
  auto lock = locked();
  auto& s = state();
  collect();
  Block* block = taken(s.pools[stream], nbytes);
  if (!block) block = made(nbytes, stream, false);
  block->live = true;
  block->asked = nbytes;
  s.in_use[stream.device] += nbytes;
  s.at_most[stream.device] = std::max(s.at_most[stream.device], s.in_use[stream.device]);
  Queue& queue = queue_of(stream);
  char* ptr = block->ptr;
  size_t size = block->size;
  note(queue, "allocate", {{ptr, ptr + size, true}}, where);
  push(queue, {Item::RUN, [ptr, size] { std::memset(ptr, 0xff, size); }, nullptr, nullptr});  // NaN in every dtype
  return ptr;
}

void release(void* ptr) {
  if (!ptr) return;
  auto lock = locked();
  auto& s = state();
  Block* block = block_of(static_cast<char*>(ptr));
  block->live = false;
  s.in_use[block->stream.device] -= block->asked;
  if (block->uses.empty()) {
    s.pools[block->stream].push_back(block);
  } else {
    leave(block, block->uses);
    block->uses.clear();
  }
}

void record_stream(void* ptr, StreamId stream) {
  auto lock = locked();
  Block* block = ptr ? block_of(static_cast<char*>(ptr)) : nullptr;
  if (block && !(block->stream == stream)) block->uses.insert(stream);
}

int device_of(const void* ptr) {
  auto lock = locked();
  Block* block = block_of(static_cast<const char*>(ptr));
  return block ? block->stream.device : 0;
}

size_t allocated(int device) { return state().in_use[device]; }
size_t peak(int device) { return state().at_most[device]; }
void reset_peak(int device) { state().at_most[device] = state().in_use[device]; }

// ---- pinned

void* allocate_pinned(size_t nbytes) {
  if (!nbytes) return nullptr;
  auto lock = locked();
  auto& s = state();
  collect();
  Block* block = taken(s.pinned_pool, nbytes);
  if (!block) {
    block = made(nbytes, {-1, 0}, true);
    s.num_pinned++;
  }
  block->live = true;
  std::memset(block->ptr, 0xff, block->size);
  return block->ptr;
}

void release_pinned(void* ptr) {
  if (!ptr) return;
  auto lock = locked();
  auto& s = state();
  Block* block = block_of(static_cast<char*>(ptr));
  block->live = false;
  std::set<StreamId> streams;
  for (auto& access : block->accesses)
    if (!before(access, s.host_clock)) streams.insert(s.by_index[access.stream]->id);
  leave(block, streams);
}

void pin(void* ptr, size_t nbytes) {
  auto lock = locked();
  auto& s = state();
  s.blocks[static_cast<char*>(ptr)] = new Block{static_cast<char*>(ptr), nbytes, nbytes, {-1, 0}, true, true, {}, {}};
  s.num_pinned++;
}

bool unpin(void* ptr) {
  std::string where = where_now();
  auto lock = locked();
  auto& s = state();
  auto it = s.blocks.find(static_cast<char*>(ptr));
  if (it == s.blocks.end() || !it->second->on_host) return false;
  check_unused(*it->second, "unpin", where);
  delete it->second;
  s.blocks.erase(it);
  s.num_pinned--;
  return true;
}

bool is_pinned(const void* ptr) {
  auto lock = locked();
  Block* block = block_of(static_cast<const char*>(ptr));
  return block && block->on_host && block->live;
}

bool has_pinned() { return state().num_pinned > 0; }

}  // namespace sim
