#include "kernels/testing/latent_cache_for_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "kernels/latents/code_pack.h"

namespace kvasir::kernels {
namespace {

// The gap before each group's numbers in an exact row, in units
// of PartSpec::exact_alignment.
constexpr int64_t kRowGap = 3;

}  // namespace

TestPart::TestPart(const PartSpec& from, int64_t num_kv_heads,
                   int64_t page_tokens, int64_t first_page, int64_t end_page,
                   uint32_t seed)
    : spec(from), seed_(seed) {
  group_of_head = spec.group_of_head;
  for (int64_t j = 0; group_of_head.size() < static_cast<size_t>(num_kv_heads);
       ++j) {
    group_of_head.push_back(static_cast<int32_t>(j));
  }
  const int32_t last =
      *std::max_element(group_of_head.begin(), group_of_head.end());
  int64_t offset = 128;
  int64_t column = 0;
  part.dtype = spec.dtype;
  part.param_dtype = spec.param_dtype;
  part.tile_slots = spec.tile_slots > 0 ? spec.tile_slots : page_tokens;
  if (spec.levels) {
    part.num_levels = 1 << spec.bits[0];
    std::vector<float> levels = Uniform(part.num_levels, seed + 3, -2.0f, 2.0f);
    std::sort(levels.begin(), levels.end());
    // kStep has so few bits that its products with integers to 127 are exact.
    constexpr float kStep = 0x1.06p-6f;
    for (float& level : levels) level = std::round(level / kStep) * kStep;
    levels.back() = 127.0f * kStep;
    std::copy(levels.begin(), levels.end(), part.levels);
  }
  const float none = 0.0f;
  // ParamsBytes only checks whether the pointer is null, so it may point
  // to anything.
  if (spec.fixed_ranges) part.static_scale = &none;
  for (int64_t g = 0; g <= last; ++g) {
    LatentGroup group;
    group.width = spec.widths[static_cast<size_t>(g) % spec.widths.size()];
    group.column = column;
    column += group.width;
    AddRuns(group.width);
    group.runs = runs_.back().data();
    group.num_runs = static_cast<int64_t>(runs_.back().size());
    PlaceRegion(CodesBytes(part, group), spec.granule_bytes, &group.codes,
                &offset);
    PlaceRegion(ParamsBytes(part, group),
                std::min(spec.granule_bytes, kMostParamGranuleBytes),
                &group.params, &offset);
    groups_.push_back(group);
  }
  part.tile_bytes = offset;
  part.page_bytes = page_tokens / part.tile_slots * part.tile_bytes + 64;
  part.groups = groups_.data();
  part.num_groups = static_cast<int64_t>(groups_.size());
  memory_.assign(static_cast<size_t>((end_page - first_page) * part.page_bytes),
                 static_cast<char>(0xff));
  part.arena = memory_.data() - first_page * part.page_bytes;
  if (spec.fixed_ranges) {
    scale_ = Uniform(column, seed + 1, 0.01f, 0.05f);
    minimum_ = Uniform(column, seed + 2, -1.0f, 0.5f);
    part.static_scale = scale_.data();
    part.static_minimum = minimum_.data();
  }
}

TestPart::~TestPart() = default;

std::vector<float> TestPart::Uniform(int64_t count, uint32_t seed, float low,
                                     float high) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& number : numbers) number = uniform(engine);
  return numbers;
}

void TestPart::Write(int64_t page, int64_t slot, uint32_t token) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const LatentGroup& group = groups_[g];
    const uint32_t seed =
        seed_ * 7919u + token * 31u + static_cast<uint32_t>(g);
    std::vector<char> codes(static_cast<size_t>(CodesBytes(part, group)));
    if (group.num_runs == 0) {
      const auto numbers = RandomFloats(group.width, seed, 0.5f);
      VisitDType(part.dtype, [&](auto type) {
        using T = decltype(type);
        for (size_t i = 0; i < numbers.size(); ++i) {
          const T stored = FromFloat<T>(numbers[i]);
          std::memcpy(codes.data() + i * sizeof(T), &stored, sizeof(T));
        }
      });
      Store(codes, group.codes, page, slot);
      continue;
    }
    WriteRandomCodes(group, seed, codes.data());
    Store(codes, group.codes, page, slot);
    if (spec.fixed_ranges) continue;
    std::vector<char> ranges(static_cast<size_t>(ParamsBytes(part, group)));
    const auto scales = Uniform(group.num_runs, seed + 1, 0.01f, 0.05f);
    const auto minima = Uniform(group.num_runs, seed + 2, -1.0f, 0.5f);
    VisitDType(part.param_dtype, [&](auto type) {
      using T = decltype(type);
      if (spec.levels) {
        const T scale = FromFloat<T>(10.0f * scales[0]);
        std::memcpy(ranges.data(), &scale, sizeof(scale));
        return;
      }
      for (size_t r = 0; r < scales.size(); ++r) {
        const T pair[2] = {FromFloat<T>(scales[r]), FromFloat<T>(minima[r])};
        std::memcpy(ranges.data() + r * sizeof(pair), pair, sizeof(pair));
      }
    });
    Store(ranges, group.params, page, slot);
  }
}

std::vector<double> TestPart::Read(int64_t kv_head, int64_t page,
                                   int64_t slot) const {
  const auto g =
      static_cast<size_t>(group_of_head[static_cast<size_t>(kv_head)]);
  const LatentGroup& group = groups_[g];
  const std::vector<char> codes =
      Load(CodesBytes(part, group), group.codes, page, slot);
  const std::vector<char> ranges =
      Load(ParamsBytes(part, group), group.params, page, slot);
  std::vector<double> numbers(static_cast<size_t>(group.width));
  const auto number_at = [](DType dtype, const char* at, int64_t index) {
    return VisitDType(dtype, [&](auto type) {
      decltype(type) stored;
      std::memcpy(&stored, at + index * static_cast<int64_t>(sizeof(type)),
                  sizeof(type));
      return static_cast<double>(ToFloat(stored));
    });
  };
  CodeCursor cursor(group);
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const CodeRun& run = group.runs[r];
    const CodePlace place = cursor.Next(run);
    for (int64_t i = 0; i < run.width; ++i) {
      const auto c = static_cast<size_t>(group.column + run.begin + i);
      const unsigned code =
          ReadCode(reinterpret_cast<const uint8_t*>(codes.data()), place, i);
      if (spec.levels) {
        numbers[static_cast<size_t>(run.begin + i)] =
            static_cast<double>(part.levels[code]) *
            number_at(part.param_dtype, ranges.data(), 0);
        continue;
      }
      const double scale =
          spec.fixed_ranges ? static_cast<double>(scale_[c])
                            : number_at(part.param_dtype, ranges.data(), 2 * r);
      const double minimum =
          spec.fixed_ranges
              ? static_cast<double>(minimum_[c])
              : number_at(part.param_dtype, ranges.data(), 2 * r + 1);
      numbers[static_cast<size_t>(run.begin + i)] = code * scale + minimum;
    }
  }
  for (int64_t i = 0; group.num_runs == 0 && i < group.width; ++i) {
    numbers[static_cast<size_t>(i)] = number_at(part.dtype, codes.data(), i);
  }
  return numbers;
}

int64_t TestPart::RingRowBytes() const {
  LatentPartArgs row;
  std::vector<LatentGroup> groups;
  LayRows(1, kRowGap * spec.exact_alignment, &row, &groups);
  return row.page_bytes;
}

void TestPart::MakeRing(int64_t bytes, int64_t bytes_before) {
  LayRows(1, kRowGap * spec.exact_alignment, &exact.ring, &ring_groups_);
  ring_memory_.assign(static_cast<size_t>(bytes), static_cast<char>(0xff));
  exact.ring.arena = ring_memory_.data() - bytes_before;
}

void TestPart::MakeFresh(int64_t rows) {
  LayRows(rows, 64, &exact.fresh, &fresh_groups_);
  fresh_memory_.assign(static_cast<size_t>(exact.fresh.page_bytes),
                       static_cast<char>(0xff));
  exact.fresh.arena = fresh_memory_.data();
}

std::vector<float> TestPart::ExactNumbers(size_t group, uint32_t token) const {
  std::vector<float> numbers = RandomFloats(
      groups_[group].width,
      seed_ * 104729u + token * 37u + static_cast<uint32_t>(group), 0.5f);
  VisitDType(spec.exact_dtype, [&](auto type) {
    for (float& number : numbers) {
      number = ToFloat(FromFloat<decltype(type)>(number));
    }
  });
  return numbers;
}

void TestPart::WriteRingRow(int64_t offset_bytes, uint32_t token) const {
  LatentPartArgs row = exact.ring;
  row.arena = static_cast<char*>(row.arena) + offset_bytes;
  WriteExact(row, 0, token);
}

void TestPart::WriteExact(const LatentPartArgs& rows, int64_t slot,
                          uint32_t token) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const std::vector<float> numbers = ExactNumbers(g, token);
    char* to = SlotAddress(rows, rows.groups[g].codes, 0, slot);
    VisitDType(spec.exact_dtype, [&](auto type) {
      for (size_t i = 0; i < numbers.size(); ++i) {
        const auto stored = FromFloat<decltype(type)>(numbers[i]);
        std::memcpy(to + i * sizeof(stored), &stored, sizeof(stored));
      }
    });
  }
}

std::vector<double> TestPart::ReadExact(int64_t kv_head, uint32_t token) const {
  const std::vector<float> numbers = ExactNumbers(
      static_cast<size_t>(group_of_head[static_cast<size_t>(kv_head)]), token);
  return {numbers.begin(), numbers.end()};
}

int64_t TestPart::WidthOf(int64_t kv_head) const {
  return groups_[static_cast<size_t>(
                     group_of_head[static_cast<size_t>(kv_head)])]
      .width;
}

void TestPart::PlaceRegion(int64_t slot_bytes, int64_t granule,
                           TileRegion* region, int64_t* offset) const {
  region->granule_bytes = granule;
  region->offset_bytes = *offset;
  region->stride_bytes = granule > 0 ? granule : slot_bytes;
  const int64_t stored =
      granule > 0 ? (slot_bytes + granule - 1) / granule * granule : slot_bytes;
  const int64_t aligned = std::max<int64_t>(8, spec.granule_bytes);
  *offset += (part.tile_slots * stored + aligned - 1) / aligned * aligned;
}

void TestPart::WriteRandomCodes(const LatentGroup& group, uint32_t seed,
                                char* slot) const {
  std::mt19937 engine(seed);
  CodeCursor cursor(group);
  std::fill_n(slot, CodesBytes(part, group), '\0');
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const CodePlace place = cursor.Next(group.runs[r]);
    for (int64_t i = 0; i < group.runs[r].width; ++i) {
      WriteCode(reinterpret_cast<uint8_t*>(slot), place, i,
                static_cast<unsigned>(engine()));
    }
  }
  const int64_t bits = PlanesOf(group).total_bits;
  if (bits % 8 == 0) return;
  slot[bits / 8] = static_cast<char>(slot[bits / 8] | (engine() << (bits % 8)));
}

void TestPart::Store(const std::vector<char>& bytes, const TileRegion& region,
                     int64_t page, int64_t slot) {
  ForSlotBytes(part, region, page, slot, static_cast<int64_t>(bytes.size()),
               [&bytes](char* to, int64_t first, int64_t count) {
                 std::copy_n(bytes.data() + first, count, to);
               });
}

std::vector<char> TestPart::Load(int64_t count, const TileRegion& region,
                                 int64_t page, int64_t slot) const {
  std::vector<char> bytes(static_cast<size_t>(count));
  ForSlotBytes(part, region, page, slot, count,
               [&bytes](const char* from, int64_t first, int64_t run) {
                 std::copy_n(from, run, bytes.data() + first);
               });
  return bytes;
}

void TestPart::LayRows(int64_t count, int64_t offset, LatentPartArgs* rows,
                       std::vector<LatentGroup>* groups) const {
  groups->clear();
  for (const LatentGroup& from : groups_) {
    LatentGroup group;
    group.width = from.width;
    group.column = from.column;
    group.codes.offset_bytes = offset;
    group.codes.stride_bytes = 2 * from.width;
    offset += count * group.codes.stride_bytes;
    groups->push_back(group);
  }
  rows->dtype = spec.exact_dtype;
  rows->page_bytes = offset;
  rows->tile_bytes = offset;
  rows->tile_slots = count;
  rows->groups = groups->data();
  rows->num_groups = static_cast<int64_t>(groups->size());
}

void TestPart::AddRuns(int64_t width) {
  std::vector<CodeRun> runs;
  const int64_t coded = width - spec.unstored;
  const int64_t step = spec.run_width > 0 ? spec.run_width : coded;
  for (int64_t c = 0; !spec.bits.empty() && c < coded; c += step) {
    runs.push_back({c, std::min(step, coded - c),
                    spec.bits[runs.size() % spec.bits.size()]});
  }
  if (spec.unstored > 0) runs.push_back({coded, spec.unstored, 0});
  runs_.push_back(std::move(runs));
}

TestRebuild::TestRebuild(const TestPart& part, int64_t num_kv_heads,
                         bool tables_only, uint32_t seed) {
  const RebuildSpec& spec = part.spec.rebuild;
  rebuild.dims = spec.dims;
  rebuild.num_pairs = spec.num_pairs;
  rebuild.attention_factor = spec.attention_factor;
  for (int64_t j = 0; j < num_kv_heads && !spec.no_lift; ++j) {
    const int64_t width = tables_only ? 0 : part.WidthOf(j);
    up.push_back(RandomFloats(spec.dims * width,
                              seed + static_cast<uint32_t>(j),
                              1.0f / std::sqrt(static_cast<float>(width))));
    up_pointers.push_back(up.back().data());
  }
  if (!spec.no_lift) rebuild.up = up_pointers.data();
  if (spec.bias) {
    bias = RandomFloats(num_kv_heads * spec.dims, seed + 100, 0.3f);
    rebuild.bias = bias.data();
  }
  // Chooses random pairs of numbers. Some numbers are in no pair.
  std::vector<int32_t> order(static_cast<size_t>(spec.dims));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed + 101));
  pair_dims.assign(order.begin(), order.begin() + 2 * spec.num_pairs);
  rebuild.pair_dims = pair_dims.data();
  const int64_t sets = spec.steps_by_head ? num_kv_heads : 1;
  for (int64_t i = 0; i < sets * spec.num_pairs; ++i) {
    radians.push_back(std::pow(
        10000.0,
        -static_cast<double>(i) / static_cast<double>(sets * spec.num_pairs)));
    steps.push_back(RopeStep(radians.back()));
  }
  rebuild.steps = steps.data();
  rebuild.head_steps_stride = spec.steps_by_head ? spec.num_pairs : 0;
}

TestRebuild::~TestRebuild() = default;

TestLift::TestLift(const TestPart& part, int64_t num_kv_heads, bool tables_only,
                   uint32_t seed) {
  lift.dims = part.spec.lift_dims;
  for (int64_t j = 0; j < num_kv_heads; ++j) {
    const int64_t width = tables_only ? 0 : part.WidthOf(j);
    up.push_back(RandomFloats(lift.dims * width,
                              seed + static_cast<uint32_t>(j),
                              1.0f / std::sqrt(static_cast<float>(width))));
    up_pointers.push_back(up.back().data());
  }
  lift.up = up_pointers.data();
}

TestLift::~TestLift() = default;

namespace {

// Converts parameters in host memory, with everything they point to, to the
// form that Prepare takes.
class AttentionShape {
 public:
  explicit AttentionShape(const PagedAttentionArgs& args);
  AttentionShape(const AttentionShape&) = delete;
  AttentionShape& operator=(const AttentionShape&) = delete;

  const PagedAttentionParams& params() const { return params_; }

 private:
  const DevicePtr<const float>* Up(const float* const* from, int64_t count);
  const ExactRows* Exact(const ExactRowsArgs* from);

  PagedAttentionParams params_;
  std::vector<AttentionKeyPart> keys_;
  std::vector<AttentionValuePart> values_;
  std::deque<KeyRebuild> rebuilds_;
  std::deque<ValueLift> lifts_;
  std::deque<ExactRows> exact_;
  std::deque<std::vector<DevicePtr<const float>>> up_;
};

AttentionShape::AttentionShape(const PagedAttentionArgs& args)
    : params_(OnDevice(args)) {
  for (int64_t p = 0; p < args.num_key_parts; ++p) {
    const AttentionKeyPartArgs& from = args.keys[p];
    keys_.push_back({OnDevice(from.latents), from.group_of_head,
                     from.query_column, nullptr, Exact(from.exact)});
    if (from.rebuild == nullptr) continue;
    rebuilds_.push_back(OnDevice(*from.rebuild));
    rebuilds_.back().up = Up(from.rebuild->up, args.num_kv_heads);
    keys_.back().rebuild = &rebuilds_.back();
  }
  for (int64_t p = 0; p < args.num_value_parts; ++p) {
    const AttentionValuePartArgs& from = args.values[p];
    values_.push_back({OnDevice(from.latents), from.group_of_head,
                       from.out_column, Exact(from.exact), nullptr});
    if (from.lift == nullptr) continue;
    lifts_.push_back(OnDevice(*from.lift));
    lifts_.back().up = Up(from.lift->up, args.num_kv_heads);
    values_.back().lift = &lifts_.back();
  }
  params_.keys = keys_.data();
  params_.values = values_.data();
}

const DevicePtr<const float>* AttentionShape::Up(const float* const* from,
                                                 int64_t count) {
  if (from == nullptr) return nullptr;
  std::vector<DevicePtr<const float>>& list = up_.emplace_back();
  for (int64_t j = 0; j < count; ++j) list.push_back(OnDevice(from[j]));
  return list.data();
}

const ExactRows* AttentionShape::Exact(const ExactRowsArgs* from) {
  return from == nullptr ? nullptr : &exact_.emplace_back(OnDevice(*from));
}

}  // namespace

absl::Status AttendOnDevice(TestStream& test, const PagedAttentionArgs& args,
                            Workspace& workspace) {
  const AttentionShape shape(args);
  KVASIR_ASSIGN_OR_RETURN(PreparedAttention attention,
                          Prepare(test.device(), shape.params()));
  KVASIR_ASSIGN_OR_RETURN(
      const AttentionStep step,
      DivideStep(attention,
                 {args.sequences, static_cast<size_t>(args.num_sequences)}));
  return PagedAttention(test.stream(), attention,
                        {OnDevice(args.q), OnDevice(args.out),
                         OnDevice(args.sequences), args.num_sequences},
                        step, workspace);
}

LatentCache::LatentCache(const LatentSpec& spec, std::vector<int64_t> lengths,
                         uint32_t seed)
    : spec_(spec), lengths_(std::move(lengths)), seed_(seed) {
  int64_t pages = 1;  // starts at 1, because one page belongs to no sequence
  for (const int64_t length : lengths_) pages += Pages(length);
  std::vector<int32_t> ids(static_cast<size_t>(pages));
  std::iota(ids.begin(), ids.end(), static_cast<int32_t>(spec.first_page));
  const int64_t end_page = spec.first_page + pages;
  std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
  auto next = ids.begin();
  for (const int64_t length : lengths_) {
    tables_.emplace_back(next, next + Pages(length));
    next += Pages(length);
    positions_.emplace_back();
    for (int64_t s = 0; s < length; ++s) {
      positions_.back().push_back(PositionOf(spec.first_position + s));
    }
  }
  if (!spec.unit_of_head.empty()) MakeMetadata(end_page);
  for (const PartSpec& part : spec.keys) AddPart(part, end_page, true);
  for (const PartSpec& part : spec.values) AddPart(part, end_page, false);
  MakeSidePages();
  WriteExact({}, 0);
  PlaceColumns();
  if (spec.key_bias) MakeKeyBias();
  for (size_t i = 0; i < lengths_.size(); ++i) {
    q_.push_back(RandomFloats(
        (lengths_[i] - FirstAsked(static_cast<int64_t>(i))) * q_stride_,
        seed * 100 + static_cast<uint32_t>(i), 0.5f));
  }
}

LatentCache::~LatentCache() = default;

std::vector<int32_t>& LatentCache::table(int64_t sequence) {
  return tables_[static_cast<size_t>(sequence)];
}

void LatentCache::ForRanges(
    int64_t count, absl::FunctionRef<void(int64_t, int64_t)> work) const {
  if (threads_ == nullptr) return work(0, count);
  threads_->ForRanges(
      count, [&](int64_t begin, int64_t end, int) { work(begin, end); });
}

int64_t LatentCache::FirstAsked(int64_t sequence) const {
  if (spec_.asked_tokens == 0) return 0;
  return std::max<int64_t>(
      0, lengths_[static_cast<size_t>(sequence)] - spec_.asked_tokens);
}

const float* LatentCache::QueryOf(int64_t sequence, int64_t token) const {
  return q_[static_cast<size_t>(sequence)].data() +
         (token - FirstAsked(sequence)) * q_stride_;
}

void LatentCache::Write(int64_t sequence, int64_t begin, int64_t end) {
  ForRanges(end - begin, [&](int64_t first, int64_t last) {
    for (int64_t t = begin + first; t < begin + last; ++t) {
      for (TestPart& part : parts_) {
        part.Write(PageOf(sequence, t), t % spec_.page_tokens,
                   TokenId(sequence, t));
      }
    }
  });
}

void LatentCache::RoundQueries(DType dtype) {
  VisitDType(dtype, [&](auto type) {
    for (std::vector<float>& rows : q_) {
      for (float& number : rows) {
        number = ToFloat(FromFloat<decltype(type)>(number));
      }
    }
  });
}

void LatentCache::ScaleQueries(int64_t column, float factor) {
  for (std::vector<float>& rows : q_) {
    for (size_t i = static_cast<size_t>(column); i < rows.size();
         i += static_cast<size_t>(q_stride_)) {
      rows[i] *= factor;
    }
  }
}

std::vector<float> LatentCache::Attend(TestStream& test,
                                       const std::vector<LatentAsk>& asks) {
  return Launch(asks, [&](const PagedAttentionArgs& args) {
    if (on_launch) on_launch(args);
    KVASIR_EXPECT_OK(AttendOnDevice(test, args, test.workspace()));
  });
}

std::vector<float> LatentCache::Launch(
    const std::vector<LatentAsk>& asks,
    absl::FunctionRef<void(const PagedAttentionArgs&)> run) {
  std::vector<float> q;
  std::vector<AttentionSequence> sequences;
  int64_t rows = 0;
  for (const LatentAsk& ask : asks) {
    const auto i = static_cast<size_t>(ask.sequence);
    q.insert(q.end(), QueryOf(ask.sequence, ask.start),
             QueryOf(ask.sequence, ask.start + ask.count));
    AttentionSequence sequence;
    sequence.first_row = rows;
    sequence.num_rows = ask.count;
    sequence.first_slot = ask.start;
    sequence.block_table = OnDevice(tables_[i].data());
    sequence.first_live_index = ask.dead_pages;
    if (spec_.first_position > 0 || spec_.position_of != nullptr) {
      sequence.positions = OnDevice(positions_[i].data());
    }
    sequence.side_pages = OnDevice(side_tables_[i].data());
    sequence.evicted = spec_.evicted;
    sequence.first_counted_row = ask.first_counted_row;
    sequences.push_back(sequence);
    rows += ask.count;
  }
  PlaceWeights(spec_.num_heads, spec_.kept_weights, spec_.page_tokens,
               absl::MakeSpan(sequences));
  WriteExact(asks, rows);
  std::vector<float> out(static_cast<size_t>(rows * out_stride_), kPoison);
  PagedAttentionArgs params = Params();
  params.q = q.data();
  params.out = out.data();
  params.sequences = sequences.data();
  params.num_sequences = static_cast<int64_t>(sequences.size());
  run(params);
  return out;
}

PagedAttentionArgs LatentCache::Params() {
  keys_.clear();
  values_.clear();
  size_t rebuild = 0;
  size_t lift = 0;
  for (size_t p = 0; p < parts_.size(); ++p) {
    const TestPart& part = parts_[p];
    if (p < spec_.keys.size()) {
      const bool rebuilds = part.spec.rebuild.dims > 0;
      keys_.push_back(
          {part.part, part.group_of_head.data(), part.columns.data(),
           rebuilds ? &rebuilds_[rebuild++].rebuild : nullptr, &part.exact});
    } else {
      values_.push_back(
          {part.part, part.group_of_head.data(), part.columns.data(),
           &part.exact,
           part.spec.lift_dims > 0 ? &lifts_[lift++].lift : nullptr});
    }
  }
  PagedAttentionArgs params;
  params.q_row_stride = q_stride_;
  params.out_row_stride = out_stride_;
  params.num_heads = spec_.num_heads;
  params.num_kv_heads = spec_.num_kv_heads;
  params.keys = keys_.data();
  params.num_key_parts = static_cast<int64_t>(keys_.size());
  params.values = values_.data();
  params.num_value_parts = static_cast<int64_t>(values_.size());
  params.page_tokens = spec_.page_tokens;
  params.scale = kScale;
  params.causal = spec_.causal;
  params.window = spec_.window;
  params.score_cap = spec_.score_cap;
  params.key_exact = key_exact_.slots;
  params.value_exact = value_exact_.slots;
  params.metadata = metadata_;
  params.unit_of_head = spec_.unit_of_head.data();
  params.mass.stored_positions = spec_.stored_positions;
  if (spec_.key_bias) params.key_bias = &key_bias_;
  if (spec_.adds_mass) {
    for (const int64_t length : lengths_) params.mass.most_rows += length;
    params.mass.most_weights = spec_.kept_weights;
  }
  return params;
}

void LatentCache::MakeMetadata(int64_t end_page) {
  metadata_.page_tokens = spec_.page_tokens;
  metadata_.num_units = 1 + *std::max_element(spec_.unit_of_head.begin(),
                                              spec_.unit_of_head.end());
  const int64_t plane = metadata_.num_units * spec_.page_tokens * 4;
  metadata_.scores_offset = 64;
  metadata_.positions_offset = 64 + plane;
  metadata_.error_offset[kKeyError] = 64 + 2 * plane;
  metadata_.error_offset[kValueError] = 64 + 2 * plane + plane / 4;
  metadata_.page_bytes = 64 + 3 * plane;
  const int64_t before = spec_.first_page * metadata_.page_bytes;
  metadata_memory_.assign(
      static_cast<size_t>(end_page * metadata_.page_bytes - before), '\xff');
  metadata_.arena = metadata_memory_.data() - before;
  for (size_t i = 0; i < tables_.size(); ++i) {
    for (int64_t s = 0; s < lengths_[i]; ++s) {
      for (int64_t u = 0; u < metadata_.num_units; ++u) {
        const int64_t page = PageOf(static_cast<int64_t>(i), s);
        PositionsOf(metadata_, page, u)[s % spec_.page_tokens] =
            static_cast<uint32_t>(
                PositionOf(spec_.first_position + s + 1000 * u));
      }
    }
  }
  ClearMass();
}

// Clears only the slots of each sequence. The slots after the last one keep
// contents that must not be accessed.
void LatentCache::ClearMass() {
  for (size_t i = 0; i < tables_.size(); ++i) {
    for (int64_t s = 0; s < lengths_[i]; ++s) {
      for (int64_t u = 0; u < metadata_.num_units; ++u) {
        ScoresOf(metadata_, PageOf(static_cast<int64_t>(i), s),
                 u)[s % spec_.page_tokens] = 0.0f;
      }
    }
  }
}

std::vector<float> LatentCache::Mass(int64_t sequence, int64_t tokens) const {
  std::vector<float> mass;
  for (int64_t u = 0; u < metadata_.num_units; ++u) {
    for (int64_t s = 0; s < tokens; ++s) {
      mass.push_back(
          ScoresOf(metadata_, PageOf(sequence, s), u)[s % spec_.page_tokens]);
    }
  }
  return mass;
}

std::vector<double> LatentCache::ExpectedMass(const LatentAsk& ask,
                                              int64_t tokens) const {
  std::vector<double> mass(static_cast<size_t>(metadata_.num_units * tokens));
  Known known;
  for (int64_t h = 0; h < spec_.num_heads; ++h) {
    for (int64_t r = ask.first_counted_row; r < ask.count; ++r) {
      const int64_t unit = spec_.unit_of_head[static_cast<size_t>(
          h / (spec_.num_heads / spec_.num_kv_heads))];
      const Weights weights = WeightsOf(ask, r, h, known);
      for (size_t i = 0; i < weights.shares.size(); ++i) {
        mass[static_cast<size_t>(unit * tokens + weights.slots[i])] +=
            weights.shares[i];
      }
    }
  }
  return mass;
}

std::vector<double> LatentCache::Expected(const LatentAsk& ask,
                                          double* score_deviation) const {
  std::vector<double> out(static_cast<size_t>(ask.count * out_stride_),
                          static_cast<double>(kPoison));
  std::vector<double> deviations(
      static_cast<size_t>(ask.count * spec_.num_heads) + 1);
  ForRanges(ask.count * spec_.num_heads, [&](int64_t begin, int64_t end) {
    Known known;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i % ask.count;
      deviations[static_cast<size_t>(i)] = AddExpected(
          ask, r, i / ask.count, known, out.data() + r * out_stride_);
    }
  });
  if (score_deviation != nullptr) {
    *score_deviation = *std::max_element(deviations.begin(), deviations.end());
  }
  return out;
}

int64_t LatentCache::PositionOf(int64_t position) const {
  return spec_.position_of != nullptr ? spec_.position_of(position) : position;
}

int64_t LatentCache::Pages(int64_t tokens) const {
  return (tokens + spec_.page_tokens - 1) / spec_.page_tokens;
}

int64_t LatentCache::PageOf(int64_t sequence, int64_t token) const {
  return tables_[static_cast<size_t>(sequence)]
                [static_cast<size_t>(token / spec_.page_tokens)];
}

// Divides the exact rows into three segments, if there are enough rows. The
// first begins inside a page whose beginning has other data. The second has
// whole pages of the same arena. The third has longer pages of another arena.
LatentCache::ExactSide LatentCache::MakeExactSide(bool is_key,
                                                  int64_t first_page) const {
  ExactSide side;
  ExactSlots& slots = side.slots;
  slots.sinks = spec_.sinks;
  slots.window = is_key ? spec_.key_exact : spec_.value_exact;
  if (!slots.any()) return side;
  slots.ring_rows =
      slots.window == 0 ? 0 : std::max<int64_t>(1, slots.window - 1);
  for (size_t p = 0; p < parts_.size(); ++p) {
    if ((p < spec_.keys.size()) != is_key) continue;
    slots.row_bytes = std::max(slots.row_bytes, parts_[p].RingRowBytes());
  }
  const int64_t page_rows = spec_.exact_page_rows;
  const int64_t alignment = parts_.front().spec.exact_alignment;
  const int64_t page_bytes = page_rows * slots.row_bytes + 11 * alignment;
  const int64_t longer_rows = 2 * page_rows + 1;
  const int64_t longer_bytes = longer_rows * slots.row_bytes + 3 * alignment;
  const int64_t begun_rows = std::max<int64_t>(1, page_rows - 1);
  const int64_t rows = slots.sinks + slots.ring_rows;
  side.num_pages = std::max<int64_t>(3, (rows + longer_rows - 1) / longer_rows);
  side.segments = {{0, first_page, begun_rows, 0, page_bytes,
                    page_bytes - begun_rows * slots.row_bytes},
                   {begun_rows, first_page + 1, page_rows, 0, page_bytes, 0},
                   {begun_rows + page_rows + 1, first_page, longer_rows, 0,
                    longer_bytes, 0}};
  return side;
}

void LatentCache::MakeSidePages() {
  key_exact_ = MakeExactSide(true, 1);
  value_exact_ = MakeExactSide(false, 1 + key_exact_.num_pages);
  for (ExactSide* const side : {&key_exact_, &value_exact_}) {
    side->slots.segments = side->segments.data();
    side->slots.num_segments = static_cast<int64_t>(side->segments.size());
  }
  const int64_t each = 1 + key_exact_.num_pages + value_exact_.num_pages;
  const auto ids_of_all = each * static_cast<int64_t>(lengths_.size());
  for (ExactSide* const side : {&key_exact_, &value_exact_}) {
    if (side->segments.empty()) continue;
    // The memory has all pages of the first arena, then those of the other one,
    // which are longer.
    const int64_t page_bytes = side->segments.front().page_bytes;
    ExactSegment& last = side->segments.back();
    side->memory_bytes = ids_of_all * (page_bytes + last.page_bytes);
    side->bytes_before = spec_.first_side_page * last.page_bytes;
    last.arena_bytes = ids_of_all * page_bytes;
    for (ExactSegment& segment : side->segments) {
      if (segment.page_bytes != page_bytes) continue;
      segment.arena_bytes =
          spec_.first_side_page * (last.page_bytes - page_bytes);
    }
  }
  std::vector<int32_t> ids(static_cast<size_t>(ids_of_all));
  std::iota(ids.begin(), ids.end(),
            static_cast<int32_t>(spec_.first_side_page));
  std::shuffle(ids.begin(), ids.end(), std::mt19937(seed_ + 1));
  for (auto next = ids.begin(); next != ids.end(); next += each) {
    side_tables_.emplace_back(next, next + each);
  }
}

uint32_t LatentCache::TokenId(int64_t sequence, int64_t token) {
  return static_cast<uint32_t>(sequence * 100000 + token);
}

void LatentCache::WriteExact(const std::vector<LatentAsk>& asks,
                             int64_t num_rows) {
  for (size_t p = 0; p < parts_.size(); ++p) {
    const ExactSide& side = ExactOf(p < spec_.keys.size());
    const ExactSlots& exact = side.slots;
    TestPart& part = parts_[p];
    if (!exact.any()) continue;
    part.MakeRing(side.memory_bytes, side.bytes_before);
    part.MakeFresh(std::max<int64_t>(1, num_rows));
    int64_t fresh_row = 0;
    for (const LatentAsk& ask : asks) {
      for (int64_t t = 0; t < ask.start; ++t) {
        if (!exact.Has(ask.start, t)) continue;
        const ExactSlots::Place place = exact.PlaceOfRow(
            exact.RowOf(t, spec_.evicted),
            side_tables_[static_cast<size_t>(ask.sequence)].data());
        part.WriteRingRow(place.offset_bytes, TokenId(ask.sequence, t));
      }
      for (int64_t r = 0; r < ask.count; ++r) {
        part.WriteExact(part.exact.fresh, fresh_row++,
                        TokenId(ask.sequence, ask.start + r));
      }
    }
  }
}

const std::vector<double>& LatentCache::RowOf(
    Known& known, size_t p, int64_t kv_head, int64_t sequence, int64_t own,
    int64_t slot,
    absl::FunctionRef<std::vector<double>(const std::vector<double>&)> compute)
    const {
  if (known.kv_head != kv_head) known = {kv_head, {}};
  const int64_t tokens =
      p < spec_.keys.size() ? spec_.key_exact : spec_.value_exact;
  const bool exact = slot < spec_.sinks || (tokens > 0 && slot > own - tokens);
  const auto num_parts = static_cast<int64_t>(parts_.size());
  const auto [row, is_new] = known.rows.try_emplace(
      (slot * num_parts + static_cast<int64_t>(p)) * 2 + exact);
  if (is_new) {
    row->second =
        compute(exact ? parts_[p].ReadExact(kv_head, TokenId(sequence, slot))
                      : parts_[p].Read(kv_head, PageOf(sequence, slot),
                                       slot % spec_.page_tokens));
  }
  return row->second;
}

void LatentCache::AddPart(const PartSpec& spec, int64_t end_page, bool is_key) {
  const auto seed =
      seed_ * 1000 + static_cast<uint32_t>(parts_.size()) * 50 + 7;
  parts_.emplace_back(spec, spec_.num_kv_heads, spec_.page_tokens,
                      spec_.first_page, end_page, seed);
  if (is_key && spec.rebuild.dims > 0) {
    rebuilds_.emplace_back(parts_.back(), spec_.num_kv_heads, spec_.tables_only,
                           seed + 10);
  }
  if (!is_key && spec.lift_dims > 0) {
    lifts_.emplace_back(parts_.back(), spec_.num_kv_heads, spec_.tables_only,
                        seed + 10);
  }
}

void LatentCache::PlaceColumns() {
  for (int64_t h = 0; h < spec_.num_heads; ++h) {
    for (size_t p = 0; p < parts_.size(); ++p) {
      TestPart& part = parts_[p];
      const bool is_key = p < spec_.keys.size();
      int64_t* next = is_key ? &q_stride_ : &out_stride_;
      part.columns.push_back(*next);
      const int64_t dims =
          is_key ? part.spec.rebuild.dims : part.spec.lift_dims;
      *next += dims > 0
                   ? dims
                   : part.WidthOf(h / (spec_.num_heads / spec_.num_kv_heads));
    }
    bias_columns_.push_back(q_stride_);
    if (spec_.key_bias) {
      q_stride_ +=
          KeyBiasColumns(spec_.bias_tile_pairs, spec_.bias_exact_pairs);
    }
  }
  q_stride_ += spec_.query_gap;
  out_stride_ += 5;
}

void LatentCache::MakeKeyBias() {
  std::mt19937 random(seed_ + 2);
  std::uniform_real_distribution<double> slow(0.0, 0.003);
  std::uniform_real_distribution<double> fast(0.003, 1.0);
  for (int64_t j = 0; j < spec_.num_kv_heads; ++j) {
    for (int64_t p = 0; p < spec_.bias_tile_pairs + spec_.bias_exact_pairs;
         ++p) {
      bias_radians_.push_back(p < spec_.bias_tile_pairs ? slow(random)
                                                        : fast(random));
      bias_steps_.push_back(RopeStep(bias_radians_.back()));
    }
  }
  key_bias_ = {spec_.bias_tile_pairs, spec_.bias_exact_pairs,
               bias_steps_.data(), bias_columns_.data(), spec_.bias_unit};
}

double LatentCache::KeyBiasOf(const float* q, int64_t head,
                              int64_t position) const {
  if (!spec_.key_bias) return 0.0;
  const int64_t kv_head = head / (spec_.num_heads / spec_.num_kv_heads);
  const int64_t tile = spec_.bias_tile_pairs;
  const int64_t pairs = tile + spec_.bias_exact_pairs;
  const int64_t n = PositionOf(position);
  const float* const numbers = q + bias_columns_[static_cast<size_t>(head)];
  double sum = 0.0;
  for (int64_t p = 0; p < pairs; ++p) {
    const int64_t at = p < tile ? n / kKeyBiasTile * kKeyBiasTile + 32 : n;
    const long double angle =
        static_cast<long double>(
            bias_radians_[static_cast<size_t>(kv_head * pairs + p)]) *
        static_cast<long double>(at);
    const int64_t u = p < tile ? p : KeyBiasTileColumns(tile) + 2 * (p - tile);
    const int64_t v = u + (p < tile ? tile : 1);
    sum +=
        static_cast<double>(numbers[u]) * static_cast<double>(std::cos(angle)) +
        static_cast<double>(numbers[v]) * static_cast<double>(std::sin(angle));
  }
  return sum * static_cast<double>(spec_.bias_unit);
}

std::vector<double> LatentCache::KeyOf(size_t p, size_t rebuild_index,
                                       int64_t kv_head,
                                       const std::vector<double>& latent,
                                       int64_t position) const {
  const TestPart& part = parts_[p];
  const RebuildSpec& spec = part.spec.rebuild;
  if (spec.dims == 0) return latent;
  const TestRebuild& from = rebuilds_[rebuild_index];
  std::vector<double> key = latent;
  if (!spec.no_lift) {
    key.assign(static_cast<size_t>(spec.dims), 0.0);
    for (size_t i = 0; i < key.size(); ++i) {
      for (size_t c = 0; c < latent.size(); ++c) {
        key[i] +=
            static_cast<double>(
                from.up[static_cast<size_t>(kv_head)][i * latent.size() + c]) *
            latent[c];
      }
    }
  }
  for (size_t i = 0; spec.bias && i < key.size(); ++i) {
    key[i] += static_cast<double>(
        from.bias[static_cast<size_t>(kv_head * spec.dims) + i]);
  }
  for (int64_t f = 0; f < spec.num_pairs; ++f) {
    const int64_t step = (spec.steps_by_head ? kv_head * spec.num_pairs : 0);
    // The angle is a long double, because a double would have an error of 1e-7
    // for angles from 2^30 radians on.
    const long double radians = from.radians[static_cast<size_t>(step + f)];
    const long double angle =
        radians * static_cast<long double>(PositionOf(position));
    const double c = static_cast<double>(std::cos(angle)) *
                     static_cast<double>(spec.attention_factor);
    const double s = static_cast<double>(std::sin(angle)) *
                     static_cast<double>(spec.attention_factor);
    double& first =
        key[static_cast<size_t>(from.pair_dims[static_cast<size_t>(2 * f)])];
    double& second = key[static_cast<size_t>(
        from.pair_dims[static_cast<size_t>(2 * f + 1)])];
    const double a = first;
    const double b = second;
    first = a * c - b * s;
    second = b * c + a * s;
  }
  return key;
}

std::vector<double> LatentCache::ValueOf(const TestLift* lift, int64_t kv_head,
                                         const std::vector<double>& latent) {
  if (lift == nullptr) return latent;
  std::vector<double> value(static_cast<size_t>(lift->lift.dims));
  const float* up = lift->lift.up[kv_head];
  for (size_t c = 0; c < latent.size(); ++c) {
    for (double& number : value) {
      number += static_cast<double>(*up++) * latent[c];
    }
  }
  return value;
}

LatentCache::Weights LatentCache::WeightsOf(const LatentAsk& ask, int64_t row,
                                            int64_t head, Known& known) const {
  const int64_t kv_head = head / (spec_.num_heads / spec_.num_kv_heads);
  const int64_t own = ask.start + row;
  const int32_t unit = spec_.unit_of_head.empty()
                           ? 0
                           : spec_.unit_of_head[static_cast<size_t>(kv_head)];
  std::vector<int64_t> slots;
  if (ask.slots_of_unit != nullptr) {
    const std::vector<int32_t>& kept =
        (*ask.slots_of_unit)[static_cast<size_t>(unit)];
    slots.assign(kept.begin(), kept.end());
  } else {
    const int64_t end = spec_.causal ? own + 1 : ask.start + ask.count;
    for (int64_t s =
             std::max(ask.dead_pages * spec_.page_tokens,
                      spec_.window > 0 ? own + 1 - spec_.window : int64_t{0});
         s < end; ++s) {
      slots.push_back(s);
    }
  }
  const float* q = QueryOf(ask.sequence, own);
  std::vector<double> weights;
  double largest_variance = 0.0;
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t s = slots[i];
    const int64_t position = spec_.stored_positions ? s + 1000 * unit
                             : ask.slots_of_unit != nullptr
                                 ? static_cast<int64_t>(i)
                                 : s;
    double score = 0.0;
    double variance = 0.0;
    size_t rebuild = 0;
    for (size_t p = 0; p < spec_.keys.size(); ++p) {
      const std::vector<double>& key =
          RowOf(known, p, kv_head, ask.sequence, own, s,
                [&](const std::vector<double>& latent) {
                  return KeyOf(p, rebuild, kv_head, latent,
                               spec_.first_position + position);
                });
      if (parts_[p].spec.rebuild.dims > 0) ++rebuild;
      const float* from = q + parts_[p].columns[static_cast<size_t>(head)];
      double largest = 0.0;
      double squares = 0.0;
      for (size_t c = 0; c < key.size(); ++c) {
        score += static_cast<double>(from[c]) * key[c];
        largest = std::max(largest, std::abs(static_cast<double>(from[c])));
        squares += key[c] * key[c];
      }
      // The rounding error of a digit is uniformly distributed over one unit of
      // the digit.
      const double step = largest / kMostQueryDigits;
      if (!parts_[p].spec.bits.empty() && parts_[p].spec.rebuild.dims == 0) {
        variance += step * step / 12.0 * squares;
      }
    }
    largest_variance = std::max(largest_variance, variance);
    score += KeyBiasOf(q, head, spec_.first_position + position);
    score *= static_cast<double>(kScale);
    const auto cap = static_cast<double>(spec_.score_cap);
    weights.push_back(cap > 0 ? cap * std::tanh(score / cap) : score);
  }
  const double max =
      weights.empty() ? 0.0 : *std::max_element(weights.begin(), weights.end());
  double sum = 0.0;
  for (double& weight : weights) sum += weight = std::exp(weight - max);
  for (double& weight : weights) weight /= sum;
  return {std::move(slots), std::move(weights),
          static_cast<double>(kScale) * std::sqrt(largest_variance)};
}

double LatentCache::AddExpected(const LatentAsk& ask, int64_t row, int64_t head,
                                Known& known, double* out) const {
  const int64_t kv_head = head / (spec_.num_heads / spec_.num_kv_heads);
  const int64_t own = ask.start + row;
  const Weights weights = WeightsOf(ask, row, head, known);
  size_t lift = 0;
  for (size_t p = spec_.keys.size(); p < parts_.size(); ++p) {
    double* to = out + parts_[p].columns[static_cast<size_t>(head)];
    const TestLift* lifted =
        parts_[p].spec.lift_dims > 0 ? &lifts_[lift++] : nullptr;
    std::fill_n(
        to, lifted != nullptr ? lifted->lift.dims : parts_[p].WidthOf(kv_head),
        0.0);
    for (size_t s = 0; s < weights.shares.size(); ++s) {
      const std::vector<double>& value =
          RowOf(known, p, kv_head, ask.sequence, own, weights.slots[s],
                [&](const std::vector<double>& latent) {
                  return ValueOf(lifted, kv_head, latent);
                });
      for (size_t i = 0; i < value.size(); ++i) {
        to[i] += weights.shares[s] * value[i];
      }
    }
  }
  return weights.score_deviation;
}

double WorstError(const PagedAttentionArgs& params,
                  const std::vector<double>& expected,
                  const std::vector<float>& got) {
  const double endless = std::numeric_limits<double>::infinity();
  if (expected.size() != got.size()) return endless;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(expected[i]) != std::isnan(got[i])) return endless;
  }
  double worst = 0.0;
  const auto rows = static_cast<int64_t>(got.size()) / params.out_row_stride;
  const int64_t queries = params.num_heads / params.num_kv_heads;
  for (int64_t p = 0; p < params.num_value_parts; ++p) {
    const AttentionValuePartArgs& part = params.values[p];
    std::vector<double> errors;
    std::vector<double> norms;
    size_t widest = 0;
    for (int64_t i = 0; i < rows * params.num_heads; ++i) {
      const int64_t h = i % params.num_heads;
      const auto first = static_cast<size_t>(
          i / params.num_heads * params.out_row_stride + part.out_column[h]);
      const auto width =
          static_cast<size_t>(OutWidth(part, part.group_of_head[h / queries]));
      widest = std::max(widest, width);
      double error = 0.0;
      double norm = 0.0;
      for (size_t c = first; c < first + width; ++c) {
        const double difference = expected[c] - static_cast<double>(got[c]);
        error += difference * difference;
        norm += expected[c] * expected[c];
      }
      errors.push_back(error);
      norms.push_back(norm);
    }
    // In a row of one channel, the sum of the values may cancel although its
    // terms are large. Its error is therefore relative to the root mean square
    // of the part's numbers if that is larger. The error of a wider row is
    // always relative to the row itself.
    const double usual =
        widest > 1 ? 0.0
                   : std::accumulate(norms.begin(), norms.end(), 0.0) /
                         static_cast<double>(norms.size());
    for (size_t i = 0; i < errors.size(); ++i) {
      // If the row sees no slot, all numbers are 0.
      if (errors[i] == 0.0) continue;
      worst = std::max(worst, std::sqrt(errors[i] / std::max(norms[i], usual)));
    }
  }
  return worst;
}

}  // namespace kvasir::kernels
