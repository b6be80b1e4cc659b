// Launches the kernels that add attention mass (attention_mass-inl.h). C++17.
#pragma once

#include "kernels/attention/cuda/attention_items.h"
#include "kernels/device/launcher.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Enqueues the kernels of a layer that has attention mass. They need nothing
// from the other kernels of the launch.
void LaunchMass(const AttentionKernelArgs& args, Launcher& launcher);

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
