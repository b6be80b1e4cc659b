#include "kernels/device/device_observer.h"

namespace kvasir::kernels {
namespace {

thread_local DeviceObserver* current = nullptr;

}  // namespace

DeviceObserver* DeviceObserver::Current() { return current; }

ObserveDevice::ObserveDevice(DeviceObserver* observer) { current = observer; }

ObserveDevice::~ObserveDevice() { current = nullptr; }

}  // namespace kvasir::kernels
