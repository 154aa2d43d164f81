// Device guard, hooks and allocators.
#include <ATen/ThreadLocalState.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <cstring>
#include <map>
#include <thread>

#include "device.h"

namespace sim {
namespace {

thread_local int device_now = 0;
thread_local std::map<int, int64_t> streams_now;

}  // namespace

int current_device() { return device_now; }
void set_current_device(int device) { device_now = device; }
int device_index(c10::Device device) { return device.index() < 0 ? device_now : device.index(); }

StreamId current_stream(int device) {
  auto it = streams_now.find(device);
  return {device, it == streams_now.end() ? 0 : it->second};
}

void forget_current_streams() { streams_now.clear(); }

c10::Stream stream_of(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(DEVICE, id.device), id.id);
}

StreamId id_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

void in_clean_state(const std::function<void()>& run) {
  static const at::ThreadLocalState* clean = [] {  // that of a new thread
    at::ThreadLocalState* made = nullptr;
    std::thread([&] { made = new at::ThreadLocalState(); }).join();
    return made;
  }();
  at::ThreadLocalStateGuard guard(*clean);
  at::RecordFunctionGuard unobserved(false);
  at::AutoDispatchBelowADInplaceOrView below;
  c10::AutoGradMode no_grad(false);
  run();
}

namespace {

struct Allocator final : public c10::DeviceAllocator {
  static void drop(void* ptr) { release(ptr); }
  c10::DataPtr allocate(size_t nbytes) override {
    void* ptr = sim::allocate(nbytes, current_stream(device_now));
    return {ptr, ptr, &drop, c10::Device(DEVICE, device_now)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    char *to = static_cast<char*>(dest), *from = static_cast<char*>(const_cast<void*>(src));
    enqueue(
        current_stream(device_of(dest)), {"copy_data", {{from, from + count, false}, {to, to + count, true}}},
        [=] { memcpy(to, from, count); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override { record_stream(ptr.get(), id_of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = allocated(device);
    stats.allocated_bytes[0].peak = peak(device);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
};

struct PinnedAllocator final : public c10::Allocator {
  static void drop(void* ptr) { release_pinned(ptr); }
  c10::DataPtr allocate(size_t nbytes) override {
    void* ptr = allocate_pinned(nbytes);
    return {ptr, ptr, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { memcpy(dest, src, count); }
};

Allocator& device_allocator() {
  static auto* made = new Allocator;
  return *made;
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = DEVICE;
  static MomentPtr& moment(void* event) { return *static_cast<MomentPtr*>(event); }
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    device_now = device_index(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(static_type, device_now); }
  void setDevice(c10::Device device) const override { device_now = device_index(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = device_index(device); }
  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(device_index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({device_index(device), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(new_stream(device_index(device), 0));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_of(new_stream(device_index(device), priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = stream_of(current_stream(stream.device_index()));
    streams_now[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(id_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(id_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<MomentPtr*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MomentPtr;
    moment(*event) = sim::record(id_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(id_of(stream), moment(event));
  }
  bool queryEvent(void* event) const override { return !event || query(moment(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(moment(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    record_stream(ptr.get(), id_of(stream));
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return moment(end)->time - moment(start)->time;
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = device; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = device_now;
    if (device >= 0) device_now = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* made = new PinnedAllocator;
    return made;
  }
  c10::Device getDeviceFromPtr(void* data) const override { return c10::Device(DEVICE, device_of(data)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? device_now : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? device_now : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    int before = exchangeDevice(impl->device().index());
    c10::DataPtr fresh = device_allocator().allocate(size);
    size_t kept = std::min(size, impl->nbytes());
    if (kept) device_allocator().copy_data(fresh.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
    exchangeDevice(before);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

c10::Allocator& allocator() { return device_allocator(); }

void install() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(DEVICE, &device_allocator(), 255);
  watch_host();
}

}  // namespace sim
