// What autograd asks of a CUDA build, for the CPU build of PyTorch: a guard that switches to a device and a stream (there is
// only one), whether the device was used, and that it is the accelerator. Loaded before PyTorch's libraries, which then
// find these functions instead of their own.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, std::atoi(std::getenv("LOCAL_RANK"))); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  DeviceIndex deviceCount() const noexcept override { return 8; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::UNSAFE, getDevice(), 0); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
namespace accelerator { std::optional<DeviceType> getAccelerator(bool) { return DeviceType::CUDA; } }
}
