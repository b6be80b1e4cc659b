#include "compress/oracle/fake_quant.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compress/tensors/hadamard_tensor.h"

namespace kvasir::compress {

using kvasir::v1::Codec;
using kvasir::v1::DataType;

namespace {

// Rounds x to the nearest number of the type, ties to even.
float RoundToType(float x, DataType dtype) {
  switch (dtype) {
    case kvasir::v1::F16:
      return static_cast<float>(c10::Half(x));
    case kvasir::v1::BF16:
      return static_cast<float>(c10::BFloat16(x));
    default:
      return x;
  }
}

// Returns the next number of the type above or below a finite number. Among
// numbers of the same sign, a greater magnitude means a greater bit pattern,
// read as an integer.
template <typename Number>
float Neighbour(float x, bool up) {
  uint16_t bits = Number(x).x;
  const bool negative = (bits & 0x8000) != 0;
  const uint16_t magnitude = bits & 0x7fff;
  if (magnitude == 0) {
    bits = up ? 0x0001 : 0x8001;
  } else if (up != negative) {
    ++bits;
  } else {
    --bits;
  }
  Number result(0.0f);
  result.x = bits;
  return static_cast<float>(result);
}

// Returns the number of the type that is one step above or below `nearest`, a
// rounded value.
float Step(float nearest, DataType dtype, bool up) {
  return dtype == kvasir::v1::F16 ? Neighbour<c10::Half>(nearest, up)
                                  : Neighbour<c10::BFloat16>(nearest, up);
}

// Rounds to an integer, ties to even, for 0 <= x < 2^22. After 2^23 is added, a
// float32 has no fraction bits, so the addition rounds.
float RoundHalfEven(float x) {
  constexpr float kNoFraction = 8388608.0f;  // 2^23
  return (x + kNoFraction) - kNoFraction;
}

struct RowView {
  const float* in = nullptr;
  float* out = nullptr;
  uint8_t* codes = nullptr;  // null if codes are not kept
  float* minimum = nullptr;
  float* scale = nullptr;
};

absl::Status NotFinite(int64_t row, int64_t channel, float value) {
  return absl::InvalidArgumentError(
      absl::StrCat("latent row ", row, " channel ", channel, " is ", value,
                   ", but must be finite"));
}

absl::Status CheckFinite(const float* in, int64_t width, int64_t row) {
  // The sum stays 0 if all numbers are finite. Otherwise it becomes NaN,
  // because an infinite number or NaN times 0 is NaN.
  float sum = 0.0f;
  for (int64_t c = 0; c < width; ++c) sum += in[c] * 0.0f;
  if (sum == 0.0f) return absl::OkStatus();
  for (int64_t c = 0; c < width; ++c) {
    if (!std::isfinite(in[c])) return NotFinite(row, c, in[c]);
  }
  return absl::OkStatus();
}

// Codes one run of a row by the rule of PER_TOKEN.
absl::Status CodeRun(const LatentCodec& codec, size_t run_index, int64_t row,
                     const RowView& view) {
  const LatentCodec::Run& run = codec.runs[run_index];
  const float* in = view.in + run.begin;
  float* out = view.out + run.begin;
  const auto [low, high] = std::minmax_element(in, in + run.width);
  const float levels = static_cast<float>((1 << run.bits) - 1);
  // The range begins at the stored minimum, so that the highest code reaches
  // the maximum.
  const float minimum = RoundDown(*low, codec.param_dtype);
  const float range = *high - minimum;
  const float scale = RoundUp(range / levels, codec.param_dtype);
  // Refuses rows whose minimum or scale overflows the type, and rows in which
  // all numbers exceed the type's largest one.
  if (!std::isfinite(minimum) || !std::isfinite(scale) ||
      !std::isfinite(RoundUp(*low, codec.param_dtype))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "latent row ", row, ": the numbers of channels ", run.begin, "..",
        run.begin + run.width - 1, " are ", *low, " to ", *high,
        ", too large for a minimum and scale of type ",
        kvasir::v1::DataType_Name(codec.param_dtype)));
  }
  for (int64_t c = 0; c < run.width; ++c) {
    const float code =
        scale == 0.0f
            ? 0.0f
            : RoundHalfEven(std::min((in[c] - minimum) / scale, levels));
    out[c] = code * scale + minimum;
    if (view.codes != nullptr) {
      view.codes[run.begin + c] = static_cast<uint8_t>(code);
    }
  }
  if (view.minimum != nullptr) {
    view.minimum[run_index] = minimum;
    view.scale[run_index] = scale;
  }
  return absl::OkStatus();
}

// Returns the sum of get(c)^2 in float32, computed in 16 lanes in the order in
// which the engine adds.
template <typename Get>
float SquareSum(int64_t width, const Get& get) {
  float lanes[16] = {};
  for (int64_t c = 0; c < width; ++c) {
    lanes[c % 16] = std::fma(get(c), get(c), lanes[c % 16]);
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Codes one row by the rule of PER_TOKEN_NORM.
absl::Status CodeNormRow(const LatentCodec& codec, int64_t row,
                         const RowView& view) {
  const int64_t width = codec.stored_width;
  const float squares = SquareSum(width, [&](int64_t c) { return view.in[c]; });
  const float length = std::sqrt(squares);
  const float root = std::sqrt(static_cast<float>(width));
  const float factor = length > 0.0f ? root / length : 0.0f;
  std::vector<float> level(static_cast<size_t>(width));
  for (int64_t c = 0; c < width; ++c) {
    const float x = view.in[c] * factor;
    size_t code = 0;
    for (size_t i = 1; i < codec.levels.size(); ++i) {
      if (x > 0.5f * (codec.levels[i - 1] + codec.levels[i])) ++code;
    }
    level[static_cast<size_t>(c)] = codec.levels[code];
    if (view.codes != nullptr) view.codes[c] = static_cast<uint8_t>(code);
  }
  const float coded = std::sqrt(SquareSum(
      width, [&](int64_t c) { return level[static_cast<size_t>(c)]; }));
  const float scale = RoundToType(length / coded, codec.param_dtype);
  if (!std::isfinite(scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("latent row ", row, " has the norm ", length,
                     ", which is too large for a scale of type ",
                     kvasir::v1::DataType_Name(codec.param_dtype)));
  }
  for (int64_t c = 0; c < width; ++c) {
    view.out[c] = level[static_cast<size_t>(c)] * scale;
  }
  if (view.scale != nullptr) *view.scale = scale;
  return absl::OkStatus();
}

// Codes one row by the rule of CHANNEL_STATIC. Returns the number of clamped
// codes.
int64_t CodeStaticRow(const LatentCodec& codec, const float* minimum,
                      const float* scale, const RowView& view) {
  int64_t clamped = 0;
  for (const LatentCodec::Run& run : codec.runs) {
    const float levels = static_cast<float>((1 << run.bits) - 1);
    for (int64_t c = run.begin; c < run.begin + run.width; ++c) {
      float code = 0.0f;
      if (run.bits > 0 && scale[c] > 0.0f) {
        const float exact = (view.in[c] - minimum[c]) / scale[c];
        code = RoundHalfEven(std::clamp(exact, 0.0f, levels));
        // A number counts as clamped only if it is more than half a step
        // outside the range; nearer numbers round to the end of the range
        // anyway.
        clamped += exact < -0.5f || exact >= levels + 0.5f ? 1 : 0;
      }
      view.out[c] = code * scale[c] + minimum[c];
      if (view.codes != nullptr) view.codes[c] = static_cast<uint8_t>(code);
    }
  }
  return clamped;
}

absl::Status CheckRange(const StaticRange* range, int64_t width) {
  if (range == nullptr || !range->minimum.defined() ||
      !range->scale.defined()) {
    return absl::InvalidArgumentError(
        "CHANNEL_STATIC: the tensor range.min or range.scale is missing");
  }
  if (!range->minimum.isfinite().all().item<bool>() ||
      !range->scale.isfinite().all().item<bool>()) {
    return absl::InvalidArgumentError(
        "CHANNEL_STATIC: range.min or range.scale has a number that is not "
        "finite");
  }
  if (range->scale.lt(0).any().item<bool>()) {
    return absl::InvalidArgumentError(
        "CHANNEL_STATIC: range.scale has a number below 0");
  }
  if (range->minimum.numel() != width || range->scale.numel() != width) {
    return absl::InvalidArgumentError(
        absl::StrCat("CHANNEL_STATIC: range.min and range.scale must have ",
                     width, " numbers, have ", range->minimum.numel(), " and ",
                     range->scale.numel()));
  }
  return absl::OkStatus();
}

absl::Status RoundRow(const LatentCodec& codec, int64_t row,
                      const RowView& view) {
  for (int64_t c = 0; c < codec.stored_width; ++c) {
    view.out[c] = RoundToType(view.in[c], codec.dtype);
  }
  for (int64_t c = 0; c < codec.stored_width; ++c) {
    if (std::isfinite(view.out[c])) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "latent row ", row, " channel ", c, " is ", view.in[c],
        ": too large for type ", kvasir::v1::DataType_Name(codec.dtype)));
  }
  return absl::OkStatus();
}

absl::StatusOr<CodedLatent> CodeOnCpu(const LatentCodec& codec,
                                      const at::Tensor& latent,
                                      const CodeOptions& options) {
  const int64_t width = codec.stored_width;
  const int64_t rows = width == 0 ? 0 : latent.numel() / width;
  const auto runs = static_cast<int64_t>(codec.runs.size());
  CodedLatent coded;
  coded.values = at::empty_like(latent);
  const bool keep = options.keep_codes && runs > 0;
  if (keep) {
    coded.codes = at::zeros(latent.sizes(), latent.options().dtype(at::kByte));
    if (!codec.channel_static) {
      std::vector<int64_t> shape = latent.sizes().vec();
      shape.back() = runs;
      coded.minimum = at::zeros(shape, latent.options());
      coded.scale = at::zeros(shape, latent.options());
    }
  }
  at::Tensor low;
  at::Tensor step;
  if (codec.channel_static) {
    if (absl::Status status = CheckRange(options.range, width); !status.ok()) {
      return status;
    }
    low = options.range->minimum.to(at::kCPU, at::kFloat).contiguous();
    step = options.range->scale.to(at::kCPU, at::kFloat).contiguous();
  }
  const bool params = keep && !codec.channel_static;
  for (int64_t row = 0; row < rows; ++row) {
    const RowView view{
        .in = latent.data_ptr<float>() + row * width,
        .out = coded.values.data_ptr<float>() + row * width,
        .codes = keep ? coded.codes.data_ptr<uint8_t>() + row * width : nullptr,
        .minimum =
            params ? coded.minimum.data_ptr<float>() + row * runs : nullptr,
        .scale = params ? coded.scale.data_ptr<float>() + row * runs : nullptr};
    absl::Status status = CheckFinite(view.in, width, row);
    if (status.ok() && runs == 0) status = RoundRow(codec, row, view);
    if (status.ok() && codec.channel_static) {
      coded.num_clamped += CodeStaticRow(codec, low.data_ptr<float>(),
                                         step.data_ptr<float>(), view);
    }
    if (status.ok() && !codec.levels.empty()) {
      status = CodeNormRow(codec, row, view);
    }
    const bool own_ranges = !codec.channel_static && codec.levels.empty();
    for (size_t run = 0; status.ok() && own_ranges && run < codec.runs.size();
         ++run) {
      status = CodeRun(codec, run, row, view);
    }
    if (!status.ok()) return status;
  }
  return coded;
}

}  // namespace

float RoundDown(float x, DataType dtype) {
  const float nearest = RoundToType(x, dtype);
  return nearest > x ? Step(nearest, dtype, /*up=*/false) : nearest;
}

float RoundUp(float x, DataType dtype) {
  const float nearest = RoundToType(x, dtype);
  return nearest < x ? Step(nearest, dtype, /*up=*/true) : nearest;
}

absl::StatusOr<LatentCodec> MakeLatentCodec(
    const plan::ResolvedPart& part, const plan::ResolvedLatent& latent) {
  if (part.range == plan::RangeKind::kSequence ||
      part.transform == plan::Transform::kBasisSequence) {
    return absl::UnimplementedError(
        "CHANNEL_SEQUENCE and BASIS_SEQUENCE depend on a whole sequence: the "
        "reference decoder does not apply them");
  }
  LatentCodec result;
  result.stored_width = latent.channels;
  if (part.transform == plan::Transform::kHadamardOnline) {
    result.hadamard = HadamardTensor(result.stored_width).to(at::kFloat);
  }
  result.dtype = part.dtype;
  result.channel_static = part.range == plan::RangeKind::kChannel;
  result.levels = part.levels;
  result.param_dtype = part.param_dtype;
  for (const plan::CodeRun& run : latent.runs) {
    const int64_t width =
        part.range_channels > 0 ? part.range_channels : run.width;
    for (int64_t at = 0; at < run.width; at += width) {
      result.runs.push_back({run.begin + at, width, run.bits});
    }
  }
  return result;
}

absl::StatusOr<LatentCodec> MakeLatentCodec(const Codec& codec, int64_t rank) {
  const plan::ResolvedPart part = plan::ResolveCodec(codec, rank);
  return MakeLatentCodec(part, part.latents[0]);
}

absl::StatusOr<CodedLatent> CodeLatent(const LatentCodec& codec,
                                       const at::Tensor& latent,
                                       const CodeOptions& options) {
  if (latent.dim() == 0 || latent.size(-1) != codec.stored_width) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the latent must have ", codec.stored_width, " channels, has ",
        latent.dim() == 0 ? 0 : latent.size(-1)));
  }
  at::Tensor exact = latent.detach().to(at::kCPU, at::kFloat);
  if (codec.hadamard.defined()) {
    exact = at::matmul(exact, codec.hadamard.transpose(0, 1));
  }
  absl::StatusOr<CodedLatent> coded =
      CodeOnCpu(codec, exact.contiguous(), options);
  if (!coded.ok()) return coded;
  if (codec.hadamard.defined()) {
    coded->values = at::matmul(coded->values, codec.hadamard);
  }
  coded->values = coded->values.to(latent.device(), latent.scalar_type());
  if (latent.requires_grad()) {
    coded->values = latent + (coded->values - latent).detach();
  }
  return coded;
}

}  // namespace kvasir::compress
