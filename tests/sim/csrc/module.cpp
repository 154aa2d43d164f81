// The Python module.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"
#include "device.h"

namespace {

namespace py = pybind11;
using Free = py::call_guard<py::gil_scoped_release>;

// Where a task is issued: what the Python function says, and the node of autograd if a backward runs.
void set_stacks(const py::object& where) {
  if (where.is_none()) return sim::set_stack_provider(nullptr);
  auto* kept = new py::object(where);
  sim::set_stack_provider([kept]() -> std::string {
    if (!Py_IsInitialized()) return "";
    auto node = torch::autograd::get_current_node();
    py::gil_scoped_acquire gil;
    auto text = py::cast<std::string>((*kept)());
    return node ? "        backward of " + node->name() + (text.empty() ? "" : "\n" + text) : text;
  });
}

py::list traced() {
  py::list list;
  for (auto& each : sim::trace()) list.append(py::make_tuple(each.name, each.device, each.stream, each.start, each.end));
  return list;
}

py::dict counts() {
  auto& s = sim::stats();
  using namespace py::literals;
  return py::dict(
      "tasks"_a = s.tasks, "syncs"_a = s.syncs, "pageable"_a = s.pageable, "host_casts"_a = s.host_casts,
      "exchanges"_a = s.exchanges, "pumped"_a = s.pumped, "forced"_a = s.forced, "reused"_a = s.reused,
      "host_accesses"_a = s.host_accesses);
}

void touch_tensor_on_host(const at::Tensor& t, const std::string& name, bool write) {
  if (!sim::has_pinned() || !t.device().is_cpu() || !t.has_storage()) return;
  std::vector<sim::Range> ranges;
  sim::touch(ranges, t, write);
  py::gil_scoped_release free;
  sim::touch_on_host(name, ranges);
}

void restart() {
  sim::forget_current_streams();
  sim::restart();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", &sim::install);
  m.def("make_backend", &sim::make_backend);
  m.def("device_count", &sim::device_count);
  m.def("set_device_count", &sim::set_device_count);
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_current_device);
  m.def("synchronize", &sim::synchronize_device, Free());
  m.def("configure", &sim::configure, Free());
  m.def("set_checks", &sim::set_checks, Free());
  m.def("set_cost", &sim::set_cost, Free());
  m.def("set_launch", &sim::set_launch, Free());
  m.def("host_time", &sim::host_time, Free());
  m.def("reach_host_time", &sim::reach_host_time, Free());
  m.def("own_host_time", &sim::own_host_time);
  m.def("drop_host_time", &sim::drop_host_time);
  m.def("set_stacks", &set_stacks);
  m.def("races", &sim::races, Free());
  m.def("reset", &sim::reset, Free());
  m.def("restart", &restart, Free());
  m.def("makespan", &sim::makespan, Free());
  m.def("trace", &traced);
  m.def("stats", &counts);
  m.def("allocated", &sim::allocated);
  m.def("peak", &sim::peak);
  m.def("reset_peak", &sim::reset_peak);
  m.def("pin", [](uintptr_t ptr, size_t nbytes) { sim::pin(reinterpret_cast<void*>(ptr), nbytes); }, Free());
  m.def("unpin", [](uintptr_t ptr) { return sim::unpin(reinterpret_cast<void*>(ptr)); }, Free());
  m.def("touch_on_host", &touch_tensor_on_host);
  m.def("manual_seed", &sim::manual_seed, Free());
  m.def("default_generator", [](int device) { return sim::default_generator(device); });
}
