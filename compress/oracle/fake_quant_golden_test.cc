// The codes in tests/golden/codes come from the oracle, and the engine's tests
// compare with them. This test checks that the oracle still produces them.
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "base/philox.h"
#include "base/status_matchers.h"
#include "compress/oracle/fake_quant.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

using nlohmann::json;

constexpr int64_t kRows = 12;
constexpr int64_t kRank = 48;

// Returns the bytes of the numbers as they are in memory, in hexadecimal, one
// string per row.
template <typename Number>
json HexRows(const Number* numbers, int64_t rows, int64_t width) {
  json result = json::array();
  for (int64_t r = 0; r < rows; ++r) {
    std::string row;
    const auto* bytes = reinterpret_cast<const uint8_t*>(numbers + r * width);
    for (size_t i = 0; i < static_cast<size_t>(width) * sizeof(Number); ++i) {
      constexpr char kDigits[] = "0123456789abcdef";
      row += kDigits[bytes[i] / 16];
      row += kDigits[bytes[i] % 16];
    }
    result.push_back(row);
  }
  return result;
}

json HexRows(const at::Tensor& floats) {
  const at::Tensor rows = floats.contiguous();
  return HexRows(rows.data_ptr<float>(), rows.numel() / rows.size(-1),
                 rows.size(-1));
}

// Returns a number in [-1, 1) with 24 bits, the same on every machine.
float Uniform(uint32_t row, uint32_t channel) {
  const uint32_t bits = base::Philox4x32({42, 0}, {row, channel, 0, 0})[0];
  return static_cast<float>(bits >> 8) * 0x1p-23f - 1.0f;
}

at::Tensor Latents() {
  at::Tensor latents = at::zeros({kRows, kRank});
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kRank; ++c) {
      const float x =
          Uniform(static_cast<uint32_t>(r), static_cast<uint32_t>(c));
      float* to = latents.data_ptr<float>() + r * kRank + c;
      switch (r) {
        case 4:  // a constant row
          *to = 1000.3f;
          break;
        case 5:
          *to = 0.0f;
          break;
        case 6:  // numbers far from zero
          *to = 500.0f + x;
          break;
        case 7:  // numbers that are subnormal as float16
          *to = x * 1e-7f;
          break;
        case 8:  // numbers that are subnormal as float32
          *to = x * 1e-41f;
          break;
        case 9:  // numbers half way between two codes
          *to = static_cast<float>(c) * 0.5f;
          break;
        case 10:  // numbers whose range is near the limit of float16
          *to = x * 32000.0f;
          break;
        case 11:  // a row with one outlier
          *to = c == 29 ? -700.0f : x;
          break;
        default:
          *to = x * 1.3f;
      }
    }
  }
  return latents;
}

StaticRange Ranges() {
  StaticRange range{at::zeros({kRank}), at::zeros({kRank})};
  for (int64_t c = 0; c < kRank; ++c) {
    const auto channel = static_cast<uint32_t>(c);
    range.minimum.data_ptr<float>()[c] = -1.0f + 0.2f * Uniform(100, channel);
    // Channel 5 has a scale of 0, like a constant channel.
    range.scale.data_ptr<float>()[c] =
        c == 5 ? 0.0f : 0.2f + 0.1f * Uniform(101, channel);
  }
  return range;
}

using Bits = std::vector<uint32_t>;

std::vector<kvasir::v1::Codec> Codecs() {
  std::vector<kvasir::v1::Codec> codecs;
  const auto add = [&codecs](const Bits& schedule) {
    kvasir::v1::Codec& codec = codecs.emplace_back();
    for (const uint32_t bits : schedule) {
      codec.mutable_bits()->add_schedule(bits);
    }
    return &codec;
  };
  const auto per_token = [&add](const Bits& schedule, uint32_t group,
                                kvasir::v1::DataType params) {
    kvasir::v1::Codec* codec = add(schedule);
    codec->mutable_per_token()->set_group(group);
    codec->set_param_dtype(params);
  };
  const Bits schedule = {8, 4, 4, 3, 2, 1, 0, 0};
  for (const uint32_t bits : {8u, 4u, 3u, 2u, 1u}) {
    per_token({bits}, 0, kvasir::v1::F16);
    per_token({bits}, 0, kvasir::v1::BF16);
    add({bits})->mutable_channel_static();
  }
  per_token({4}, 8, kvasir::v1::F16);
  per_token({3}, 16, kvasir::v1::BF16);
  per_token({4}, 0, kvasir::v1::F32);
  per_token(schedule, 0, kvasir::v1::F16);
  per_token(schedule, 3, kvasir::v1::F32);
  per_token({8, 4, 3, 3, 2, 1, 1, 0}, 3, kvasir::v1::BF16);
  add(schedule)->mutable_channel_static();
  for (const auto dtype :
       {kvasir::v1::F32, kvasir::v1::F16, kvasir::v1::BF16}) {
    codecs.emplace_back().set_dtype(dtype);
  }
  return codecs;
}

json Case(const kvasir::v1::Codec& plan, const at::Tensor& latents,
          const StaticRange& ranges) {
  const auto codec = MakeLatentCodec(plan, kRank);
  KVASIR_EXPECT_OK(codec);
  if (!codec.ok()) return {};
  const int64_t width = codec->stored_width;
  const StaticRange range{ranges.minimum.slice(0, 0, width),
                          ranges.scale.slice(0, 0, width)};
  const auto coded = CodeLatent(*codec, latents.slice(1, 0, width),
                                {.range = &range, .keep_codes = true});
  KVASIR_EXPECT_OK(coded);
  if (!coded.ok()) return {};
  json result;
  if (codec->runs.empty()) {
    result["dtype"] = kvasir::v1::DataType_Name(codec->dtype);
    result["values"] = HexRows(coded->values);
    return result;
  }
  for (const LatentCodec::Run& run : codec->runs) {
    result["runs"].push_back({run.begin, run.width, run.bits});
  }
  const at::Tensor codes = coded->codes.contiguous();
  result["codes"] = HexRows(codes.data_ptr<uint8_t>(), kRows, width);
  if (codec->channel_static) {
    result["clamped"] = coded->num_clamped;
  } else {
    result["param_dtype"] = kvasir::v1::DataType_Name(codec->param_dtype);
    // The addition turns -0 into +0, so that zeros are always recorded as +0.
    result["minimum"] = HexRows(coded->minimum + 0.0f);
    result["scale"] = HexRows(coded->scale + 0.0f);
  }
  return result;
}

TEST(FakeQuantGoldenTest, CodesEqualTheRecordedGoldenCodes) {
  const at::Tensor latents = Latents();
  const StaticRange ranges = Ranges();
  json golden;
  golden["latents"] = HexRows(latents);
  golden["static_minimum"] = HexRows(ranges.minimum);
  golden["static_scale"] = HexRows(ranges.scale);
  for (const kvasir::v1::Codec& codec : Codecs()) {
    golden["cases"].push_back(Case(codec, latents, ranges));
  }
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  ASSERT_NE(source, nullptr);
  const std::string path =
      std::string(source) + "/tests/golden/codes/latents.json";
  if (std::getenv("KVASIR_WRITE_GOLDEN") != nullptr) {
    std::ofstream(path) << golden.dump(1) << '\n';
  }
  std::ifstream file(path);
  ASSERT_TRUE(file.good()) << path;
  EXPECT_TRUE(json::parse(file) == golden)
      << path << " is not what the oracle writes; KVASIR_WRITE_GOLDEN=1 "
      << "writes it anew";
}

}  // namespace
}  // namespace kvasir::compress
