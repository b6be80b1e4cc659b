// How matrix products on the CPU are divided among threads. For inclusion by
// *_cpu.cc.
#pragma once

#include <cstdint>

#include "kernels/linear/matmul.h"

namespace kvasir::kernels {

inline constexpr int64_t kMaxTileRows = 12;

// The most rows for which the loop for few rows is used. This loop converts the
// weights of a panel to float32 again for each tile of rows. With few tiles,
// this costs less than first storing a converted copy of a block.
inline constexpr int64_t kFewRows = 36;

// The work is divided into this many parts per thread. With few rows, parts are
// small, so that threads wait only briefly for the last one. With many rows,
// parts are larger, because the panels of a part share one copy of the rows.
inline constexpr int64_t kFewRowsPartsPerThread = 16;
inline constexpr int64_t kManyRowsPartsPerThread = 4;
// With fewer multiply-adds than this, waking the other threads takes longer
// than doing the work on one.
inline constexpr int64_t kWorthWaking = 100000;

// The part of y that one thread computes at a time.
struct MatmulPart {
  int64_t panel_begin;
  int64_t panel_end;
  int64_t row_begin;
  int64_t row_end;
};

// Computes one part of a product. `scratch` has MatmulScratch floats for all
// threads.
void RunMatmulPart(const MatmulArgs& params, const MatmulPart& part, int thread,
                   float* scratch);

}  // namespace kvasir::kernels
