// What eviction's bookkeeping costs, against the same op without it, in pairs:
//  - decode: attention of 8 sequences of 8192 slots that adds mass, of weights
//    that are kept, and of keys that are scored again;
//  - prompts: a chunk of 512 rows behind 3584 slots, all of them counted and
//    the last 64 (an observation window);
//  - appending 512 tokens with positions and quantization errors.
// A layer of 32 query heads over 8 KV heads of 128 dims, codes of 8 and 4 bits.
// --quick: a smoke test, whose figures mean nothing. bench/performance.sh runs
// it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/machine.h"
#include "base/thread_pool.h"
#include "bench/paired.h"
#include "kernels/attention/ops.h"
#include "kernels/device/device.h"
#include "kernels/latents/ops.h"
#include "nlohmann/json.hpp"

namespace kvasir::bench {
namespace {

using kernels::DevicePtr;

constexpr int64_t kHeads = 32;
constexpr int64_t kKvHeads = 8;
constexpr int64_t kDims = 128;
constexpr int64_t kPageTokens = 64;
constexpr int64_t kSequences = 8;

struct Sizes {
  int pairs = 9;
  int64_t context = 8192;  // of each sequence that decodes
  int64_t chunk = 512;
  int64_t prompt_context = 4096;  // the chunk included
  int64_t window = 64;            // of observation

  int64_t pages() const { return kSequences * context / kPageTokens; }
};
constexpr Sizes kQuick = {2, 128, 64, 128, 16};

std::vector<float> Numbers(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& number : numbers) number = normal(engine);
  return numbers;
}

// One layer's arena: keys, values, planes for a unit of each KV head.
class Layer {
 public:
  Layer(base::ThreadPool* pool, int bits, const Sizes& sizes)
      : sizes_(sizes), device_(pool), stream_(device_.MakeStream()) {
    run_ = {0, kDims, bits};
    int64_t offset = 0;
    const auto place = [&offset](kernels::TileRegion* region, int64_t bytes) {
      region->offset_bytes = offset;
      region->stride_bytes = bytes;
      offset += kPageTokens * bytes;
    };
    for (std::vector<kernels::LatentGroup>* side : {&keys_, &values_}) {
      for (int64_t g = 0; g < kKvHeads; ++g) {
        kernels::LatentGroup& group = side->emplace_back();
        group.width = kDims;
        group.column = g * kDims;
        group.runs = &run_;
        group.num_runs = 1;
        place(&group.codes, kDims * bits / 8);
        place(&group.params, 4);
      }
    }
    const int64_t tile_bytes = offset;
    metadata_.page_tokens = kPageTokens;
    metadata_.scores_offset = tile_bytes;
    metadata_.positions_offset = tile_bytes + kKvHeads * kPageTokens * 4;
    metadata_.error_offset[0] = tile_bytes + kKvHeads * kPageTokens * 8;
    metadata_.error_offset[1] = tile_bytes + kKvHeads * kPageTokens * 9;
    metadata_.page_bytes = tile_bytes + kKvHeads * kPageTokens * 10;
    arena_.resize(static_cast<size_t>(sizes_.pages() * metadata_.page_bytes));
    metadata_.arena = DevicePtr<char>(arena_.data());
    for (const bool key : {true, false}) {
      kernels::LatentPart& part = key ? key_part_ : value_part_;
      part.arena = metadata_.arena;
      part.page_bytes = metadata_.page_bytes;
      part.tile_bytes = tile_bytes;
      part.tile_slots = kPageTokens;
      part.groups = key ? keys_.data() : values_.data();
      part.num_groups = kKvHeads;
    }
    for (int32_t j = 0; j < kKvHeads; ++j) heads_.push_back(j);
    for (int64_t h = 0; h < kHeads; ++h) columns_.push_back(h * kDims);
    layer_unit_.assign(kKvHeads, 0);
    table_.resize(sizes_.pages());
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), std::mt19937(1));
    q_ = Numbers(sizes_.chunk * kHeads * kDims, 2);
    out_.resize(q_.size());
    rows_ = Numbers(sizes_.chunk * 2 * kKvHeads * kDims, 3);
    for (int64_t first = 0; first < sizes_.pages() * kPageTokens;
         first += sizes_.chunk) {
      Append(kernels::SlotMetadata(), first)();
    }
  }
  Layer(const Layer&) = delete;

  kernels::SlotMetadata metadata(int64_t num_units) const {
    kernels::SlotMetadata metadata = metadata_;
    metadata.num_units = num_units;
    return metadata;
  }

  // One launch over a chunk of slots.
  std::function<void()> Append(const kernels::SlotMetadata& metadata,
                               int64_t first) {
    slots_.resize(sizes_.chunk);
    std::iota(slots_.begin(), slots_.end(), first);
    std::vector<kernels::KvAppendPart> parts(2);
    for (const bool key : {true, false}) {
      kernels::KvAppendPart& part = parts[key ? 0 : 1];
      part.part = key ? key_part_ : value_part_;
      part.column = key ? 0 : kKvHeads * kDims;
      if (metadata.num_units == 0) continue;
      part.unit_of_group = UnitsOf(metadata);
      part.errors_of[key ? 0 : 1] = true;
    }
    auto prepared =
        std::make_shared<kernels::PreparedKvAppend>(*kernels::Prepare(
            device_,
            kernels::KvAppendShape{.row_stride = 2 * kKvHeads * kDims,
                                   .page_tokens = kPageTokens,
                                   .metadata = metadata},
            parts));
    const kernels::KvAppendRows rows = {
        DevicePtr<const float>(rows_.data()),
        DevicePtr<const int64_t>(slots_.data()), sizes_.chunk,
        DevicePtr<float>(), DevicePtr<const int64_t>(slots_.data())};
    return Ready([this, prepared, rows](kernels::Workspace& workspace) {
      return kernels::KvAppend(*stream_, *prepared, rows, workspace);
    });
  }

  struct Mass {
    int64_t num_units = 0;  // 0: none is added
    bool keeps_weights = false;
    int64_t first_counted_row = 0;
  };
  // Rows of as many sequences; the last ones of their contexts.
  std::function<void()> Attend(int64_t num_sequences, int64_t num_rows,
                               const Mass& mass) {
    const int64_t context =
        num_rows == 1 ? sizes_.context : sizes_.prompt_context;
    kernels::AttentionKeyPart key;
    key.latents = key_part_;
    key.group_of_head = heads_.data();
    key.query_column = columns_.data();
    kernels::AttentionValuePart value;
    value.latents = value_part_;
    value.group_of_head = heads_.data();
    value.out_column = columns_.data();
    kernels::PagedAttentionParams shape;
    shape.q_row_stride = kHeads * kDims;
    shape.out_row_stride = kHeads * kDims;
    shape.num_heads = kHeads;
    shape.num_kv_heads = kKvHeads;
    shape.keys = &key;
    shape.num_key_parts = 1;
    shape.values = &value;
    shape.num_value_parts = 1;
    shape.page_tokens = kPageTokens;
    shape.scale = 0.088f;
    if (mass.num_units > 0) {
      shape.metadata = metadata(mass.num_units);
      shape.unit_of_head = UnitsOf(shape.metadata);
      shape.mass.most_rows = num_sequences * num_rows;
      shape.mass.most_weights =
          mass.keeps_weights ? num_sequences * sizes_.context * (kHeads + 1)
                             : 0;
    }
    auto sequences =
        std::make_shared<std::vector<kernels::AttentionSequence>>();
    for (int64_t i = 0; i < num_sequences; ++i) {
      kernels::AttentionSequence& sequence = sequences->emplace_back();
      sequence.first_row = i * num_rows;
      sequence.num_rows = num_rows;
      sequence.first_slot = context - num_rows;
      sequence.first_counted_row = mass.first_counted_row;
      sequence.block_table = DevicePtr<const int32_t>(
          table_.data() + i * sizes_.context / kPageTokens);
    }
    kernels::PlaceWeights(kHeads, shape.mass.most_weights, kPageTokens,
                          absl::MakeSpan(*sequences));
    auto prepared = std::make_shared<kernels::PreparedAttention>(
        *kernels::Prepare(device_, shape));
    const kernels::AttentionStep step =
        *kernels::DivideStep(*prepared, *sequences);
    return Ready([=, this](kernels::Workspace& workspace) {
      return kernels::PagedAttention(
          *stream_, *prepared,
          {DevicePtr<const float>(q_.data()), DevicePtr<float>(out_.data()),
           DevicePtr<const kernels::AttentionSequence>(sequences->data()),
           num_sequences},
          step, workspace);
    });
  }

 private:
  const int32_t* UnitsOf(const kernels::SlotMetadata& metadata) const {
    return metadata.num_units == 1 ? layer_unit_.data() : heads_.data();
  }
  // With a workspace of its own.
  template <typename Launch>
  std::function<void()> Ready(const Launch& launch) {
    kernels::Workspace counter = kernels::Workspace::Counting();
    KVASIR_CHECK(launch(counter).ok());
    auto memory =
        std::make_shared<std::vector<char>>(counter.peak_bytes() + 64);
    return [launch, memory] {
      kernels::Workspace workspace(DevicePtr<char>(memory->data()),
                                   memory->size());
      KVASIR_CHECK(launch(workspace).ok());
    };
  }

  const Sizes sizes_;
  kernels::CpuDevice device_;
  std::unique_ptr<kernels::Stream> stream_;
  kernels::CodeRun run_;
  std::vector<kernels::LatentGroup> keys_;
  std::vector<kernels::LatentGroup> values_;
  kernels::LatentPart key_part_;
  kernels::LatentPart value_part_;
  kernels::SlotMetadata metadata_;
  std::vector<char> arena_;
  std::vector<int32_t> heads_;
  std::vector<int32_t> layer_unit_;
  std::vector<int64_t> columns_;
  std::vector<int32_t> table_;
  std::vector<float> q_;
  std::vector<float> out_;
  std::vector<float> rows_;
  std::vector<int64_t> slots_;
};

// What `with` takes more than `without`, as a share of it.
nlohmann::json Share(int pairs, const std::function<void()>& with,
                     const std::function<void()>& without) {
  with();
  without();
  std::vector<double> more;
  std::vector<double> base;
  for (int pair = 0; pair < pairs; ++pair) {
    more.push_back(SecondsOf(with));
    base.push_back(SecondsOf(without));
  }
  const PairedRatio ratio = RatioOf(more, base);
  return {{"share", ratio.median - 1.0},
          {"spread", ratio.spread},
          {"undecided", ratio.undecided()},
          {"without_ms", Quantile(base, 0.5) * 1e3}};
}

nlohmann::json Run(const Sizes& sizes) {
  const base::MachineLimits machine = base::ReadMachineLimits();
  base::ThreadPool pool(machine.cpus);
  nlohmann::json result;
  result["machine"] = {{"cpu", base::CpuModelName()},
                       {"instructions", kernels::CpuTargetName()},
                       {"threads", pool.num_threads()}};
  result["rows"] = nlohmann::json::array();
  for (const int bits : {8, 4}) {
    Layer layer(&pool, bits, sizes);
    const int64_t chunk = sizes.chunk;
    const auto append = layer.Append({}, 0);
    const auto decode = layer.Attend(kSequences, 1, {});
    const auto prompt = layer.Attend(1, chunk, {});
    for (const int64_t units : {int64_t{1}, kKvHeads}) {
      const auto add = [&](const char* what, const std::function<void()>& with,
                           const std::function<void()>& without) {
        nlohmann::json row = Share(sizes.pairs, with, without);
        row["bits"] = bits;
        row["unit"] = units == 1 ? "layer" : "KV head";
        row["what"] = what;
        result["rows"].push_back(std::move(row));
      };
      add("decode, kept weights", layer.Attend(kSequences, 1, {units, true}),
          decode);
      add("decode, scored again", layer.Attend(kSequences, 1, {units}), decode);
      add("prompt, all rows", layer.Attend(1, chunk, {units}), prompt);
      add("prompt, last rows",
          layer.Attend(1, chunk, {units, false, chunk - sizes.window}), prompt);
      add("append", layer.Append(layer.metadata(units), 0), append);
    }
  }
  return result;
}

}  // namespace
}  // namespace kvasir::bench

int main(int argc, char** argv) {
  const bool quick = argc == 2 && std::string(argv[1]) == "--quick";
  if (argc > 1 && !quick) {
    std::fprintf(stderr, "usage: bench_attention_mass [--quick]\n");
    return 2;
  }
  using kvasir::bench::Sizes;
  std::printf("%s\n",
              kvasir::bench::Run(quick ? kvasir::bench::kQuick : Sizes())
                  .dump(2)
                  .c_str());
  return 0;
}
