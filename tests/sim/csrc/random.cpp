// Generators: a seed and a count of the random operators so far, as CUDA's Philox generators have.
//
// Each random operator draws a seed when it is issued; its task makes a CPU generator of that. So numbers do not depend
// on the order of work, and equal states give equal numbers.
#include <ATen/ATen.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>

#include "device.h"

namespace sim {
namespace {

struct Generator final : public c10::GeneratorImpl {
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(DEVICE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { state_ = {seed, 0}; }
  void set_offset(uint64_t offset) override { state_[1] = offset; }
  uint64_t get_offset() const override { return state_[1]; }
  uint64_t current_seed() const override { return state_[0]; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_[0];
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof(state_) && state.dtype() == at::kByte, "the state of a generator is 16 bytes");
    memcpy(state_.data(), state.data(), sizeof(state_));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({sizeof(state_)}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    memcpy(state.mutable_data_ptr(), state_.data(), sizeof(state_));
    return state.getIntrusivePtr();
  }
  uint64_t next() { return state_[0] * 0x9E3779B97F4A7C15ull + ++state_[1]; }
  static c10::DeviceType device_type() { return DEVICE; }

 private:
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->state_ = state_;
    return made;
  }
  std::array<uint64_t, 2> state_{c10::default_rng_seed_val, 0};
};

}  // namespace

at::Generator new_generator(int device) { return at::make_generator<Generator>(device); }

const at::Generator& default_generator(int device) {
  static auto* made = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int i = 0; i < 16; i++) generators->push_back(new_generator(i));
    return generators;
  }();
  return made->at(device);
}

uint64_t next_seed(const std::optional<at::Generator>& generator, int device) {
  at::Generator used = generator && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(used.device().type() == DEVICE, "the generator must be on sim, but is on ", used.device());
  std::lock_guard<std::mutex> lock(used.mutex());
  return static_cast<Generator*>(used.unsafeGetGeneratorImpl())->next();
}

void manual_seed(uint64_t seed) {
  for (int i = 0; i < device_count(); i++) {
    auto generator = default_generator(i);
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

}  // namespace sim
