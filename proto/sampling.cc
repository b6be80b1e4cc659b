#include "proto/sampling.h"

namespace kvasir::proto {

kvasir::v1::SamplingParams NeutralSampling() {
  kvasir::v1::SamplingParams params;
  params.set_temperature(1.0f);
  params.set_top_p(1.0f);
  params.set_repetition_penalty(1.0f);
  params.set_n(1);
  return params;
}

}  // namespace kvasir::proto
