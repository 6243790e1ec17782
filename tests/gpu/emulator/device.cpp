// A device that is host memory. Every kernel runs at once, on the CPU (device.py); clocks.h checks whether a real
// device could have run it at another time. This file is what torch needs of a device: streams, events, memory,
// views.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "clocks.h"

namespace emulator {
constexpr auto KIND = c10::DeviceType::PrivateUse1;
using Lock = std::lock_guard<std::recursive_mutex>;

World& world() {
  static auto* made = new World;
  return *made;
}
thread_local int64_t current = 0;

c10::Stream as_stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, {KIND, 0}, id); }

// Whether all of this is over: every kernel has run, and a device may be as quick. The host knows it from here on.
bool over(const Clock& clock) {
  if (!world().ends(clock)) return false;
  world().host_waits_for(clock);
  return true;
}

struct Event {
  Clock clock;
  uint64_t time;  // of its stream
  bool asked = false;
};
Event& as_event(void* event) { return *static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return {KIND, 0}; }
  c10::Device getDevice() const override { return {KIND, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock held(world().lock);
    return as_stream(world().new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current;
    current = stream.id();
    return as_stream(before);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock held(world().lock);
    return over(world().clock(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock held(world().lock);
    TORCH_CHECK(over(world().clock(stream.id())), "the host would wait for ever");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Lock held(world().lock);
    world().host_waits_for_all();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock held(world().lock);
    if (!*event) *event = new Event;
    as_event(*event) = {world().clock(stream.id(), 1), world().time(stream.id())};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Lock held(world().lock);
    join(world().clock(stream.id()), as_event(event).clock);
    world().time(stream.id()) = std::max(world().time(stream.id()), as_event(event).time);
  }
  // A device is late: it is not done when it is asked first, unless the host has waited for that already.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock held(world().lock);
    if (world().host_knows(as_event(event).clock)) return true;
    return std::exchange(as_event(event).asked, true) && over(as_event(event).clock);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock held(world().lock);
    TORCH_CHECK(world().host_knows(as_event(event).clock) || over(as_event(event).clock), "the host would wait for ever");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* since, void* until, const c10::DeviceIndex) const override {  // milliseconds
    auto nanoseconds = static_cast<int64_t>(as_event(until).time) - static_cast<int64_t>(as_event(since).time);
    return static_cast<double>(nanoseconds) * 1e-6;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Lock held(world().lock);
    world().record(reinterpret_cast<uintptr_t>(data.get()), stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void release(void* address) {
  {
    Lock held(world().lock);
    world().freed(reinterpret_cast<uintptr_t>(address));
  }
  free(address);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = nullptr;
    if (size) {
      TORCH_CHECK(!posix_memalign(&address, 512, size), "no memory");
      Lock held(world().lock);
      world().allocated(reinterpret_cast<uintptr_t>(address), size, current);
    }
    return {address, address, &release, {KIND, 0}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};
Memory* memory() {
  static auto* made = new Memory;
  return made;
}
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, memory())

// Pinned host memory: asynchronous copies are possible only to and from it.
std::map<uintptr_t, size_t>& pinned() {
  static auto* made = new std::map<uintptr_t, size_t>;
  return *made;
}
void unpin(void* address) {
  {
    Lock held(world().lock);
    pinned().erase(reinterpret_cast<uintptr_t>(address));
  }
  free(address);
}
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = nullptr;
    TORCH_CHECK(!posix_memalign(&address, 512, std::max<size_t>(size, 1)), "no memory");
    Lock held(world().lock);
    pinned()[reinterpret_cast<uintptr_t>(address)] = size;
    return {address, address, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* made = new Pinned;
    return made;
  }
  bool isPinnedPtr(const void* data) const override {
    Lock held(world().lock);
    auto address = reinterpret_cast<uintptr_t>(data);
    auto next = pinned().upper_bound(address);
    if (next == pinned().begin()) return false;
    auto [start, size] = *--next;
    return address < start + size;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto before = storage.nbytes();
    auto made = memory()->allocate(size);
    if (before && size) memcpy(made.get(), storage.data(), std::min(before, size));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}
const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  size_t numel = 1;
  for (auto length : size) numel *= length;
  size_t need = (numel + self.storage_offset()) * self.element_size();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < need) {
    auto larger = memory()->allocate(need);
    if (storage->nbytes()) memcpy(larger.get(), storage->mutable_data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(need);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("record_stream", &record_stream);
  m.impl("resize_", &resize);
}

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  static char nothing[512];
  void* data = tensor.numel() ? tensor.data_ptr() : nothing;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {}, options);
}

// A kernel on the current stream reads or writes a tensor.
void touch(const at::Tensor& tensor, bool write, const std::string& where) {
  if (!tensor.numel()) return;
  auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  Lock held(world().lock);
  world().access(begin, begin + (last + 1) * tensor.element_size(), current, write, where);
}

// Copy to pinned memory when the host has waited for what the current stream has done so far.
void deliver(const at::Tensor& from, const at::Tensor& to) {
  Lock held(world().lock);
  world().deliver(current, [from, to] { memcpy(to.data_ptr(), from.data_ptr(), from.nbytes()); });
}

// The host waits for the current stream.
void wait() { Guard().synchronizeStream(as_stream(current)); }

std::vector<std::tuple<std::string, std::string, std::string>> races() {
  Lock held(world().lock);
  std::vector<std::tuple<std::string, std::string, std::string>> found;
  for (auto& race : world().races) found.emplace_back(race.kind, race.now, race.before);
  world().races.clear();
  return found;
}
}  // namespace emulator

PYBIND11_MODULE(emulated_device, m) {
  at::RegisterPrivateUse1HooksInterface(new emulator::Hooks);
  m.def("on_cpu", &emulator::on_cpu);
  m.def("touch", &emulator::touch);
  m.def("deliver", &emulator::deliver);
  m.def("busy", [](uint64_t nanoseconds) { emulator::world().time(emulator::current) += nanoseconds; });
  m.def("wait", &emulator::wait);
  m.def("current", [] { return emulator::current; });
  m.def("stick", [] { emulator::world().stick(emulator::current); });
  m.def("free_stuck", [] { emulator::world().free_stuck(); });
  m.def("host_waits", [] { return emulator::world().host_waits; });
  m.def("races", &emulator::races);
}
