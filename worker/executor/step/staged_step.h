// A checked and uploaded step, with all data for launching it and for
// collecting its results. Plain data.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/device/device_ptr.h"
#include "kernels/latents/copy_pages.h"
#include "kernels/sampling/sample.h"
#include "worker/executor/step/step_batch.h"
#include "worker/executor/step/step_layout.h"
#include "worker/executor/step/step_rows.h"

namespace kvasir::worker {

class SlotEvictions;  // worker/executor/slot_evictions.h

// Where a step's results lie on the device, in StepState::results().
struct StepResults {
  kernels::DevicePtr<int32_t> token_ids;      // [samples]
  kernels::DevicePtr<float> logprobs;         // [samples]
  kernels::DevicePtr<int32_t> top_ids;        // [samples, top]
  kernels::DevicePtr<float> top_logprobs;     // [samples, top]
  kernels::DevicePtr<float> target_logprobs;  // [targets]
  kernels::DevicePtr<float> not_finite;       // [T], see TokenBatch::not_finite
};

// The step's counts, device addresses in the uploaded blob, and host arrays. T
// is the number of tokens. The Stager owns one StagedStep and reuses it for
// every step.
struct StagedStep {
  uint64_t step_id = 0;
  StepSizes sizes;
  StepBucket bucket;
  const StepBatch* batch = nullptr;          // the step's host arrays
  const SlotEvictions* evictions = nullptr;  // the step's evictions
  int64_t blob_peaks = 0;                    // see StepBlob::peaks

  kernels::DevicePtr<const kernels::PagePair> copies;  // see CopyList::pairs
  kernels::DevicePtr<const int32_t> ids;               // [T]
  kernels::DevicePtr<const int32_t> token_sources;     // [T]
  kernels::DevicePtr<const int64_t> positions;         // [T]
  std::vector<AttentionBatch> groups;                  // by page group
  std::vector<kernels::DevicePtr<const int64_t>> ring_slots;  // by ring
  kernels::DevicePtr<const int32_t> sample_rows;              // [samples]
  kernels::DevicePtr<const kernels::SampleRow> samples;       // [samples]
  // Where each row of StepState::last_sampled() gets its next value, as an
  // offset from last_sampled() in int32 elements. [max sequences]
  kernels::DevicePtr<const int32_t> carried;
  kernels::DevicePtr<const int32_t> target_rows;              // [targets]
  kernels::DevicePtr<const int32_t> target_ids;               // [targets]
  kernels::DevicePtr<const kernels::TokenHistory> histories;  // [histories]
  kernels::DevicePtr<const int32_t> zeros;                    // [T]
  // The numbers 0, 1, ... T - 1. Set only if there is a logits tap. [T]
  kernels::DevicePtr<const int32_t> all_rows;

  ResultLayout layout;
  StepResults results;
};

}  // namespace kvasir::worker
