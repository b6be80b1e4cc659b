// A cache of latents for tests, with any kinds of parts, random contents, and
// pages in random order. Slots that were not written hold NaN, and so do exact
// rows that no query reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <unordered_map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "base/thread_pool.h"
#include "kernels/attention/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {

// How keys are rebuilt from their latents before they are rotated. If dims is
// 0, keys are not rebuilt.
struct RebuildSpec {
  int64_t dims = 0;
  int64_t num_pairs = 0;
  bool bias = false;
  bool no_lift = false;
  bool steps_by_head = false;
  float attention_factor = 1.0f;
};

// One part of the keys or the values. If group_of_head is empty, each KV head
// has a group of its own.
struct PartSpec {
  std::vector<int64_t> widths = {32};  // group g has widths[g % size]
  std::vector<int32_t> group_of_head = {};
  // The bits per code of each run: run r has bits[r % size]. If empty, the part
  // stores unquantized numbers.
  std::vector<int> bits = {};
  int64_t run_width = 0;  // 0: one run for all channels
  DType dtype = DType::kBf16;
  DType param_dtype = DType::kF16;
  bool fixed_ranges = false;
  // how many channels at the end of the latent have 0 bits; must be 0
  // without fixed_ranges
  int64_t unstored = 0;
  bool levels = false;  // codes stand for levels, and each token has one scale
  RebuildSpec rebuild = {};
  // if above 0, values are lifted to heads of this size
  int64_t lift_dims = 0;
  int64_t tile_slots = 0;     // 0: a page is one tile
  int64_t granule_bytes = 0;  // 0: slots follow one another
  // The type of the exact rows, and the alignment of these rows and their
  // pages.
  DType exact_dtype = DType::kBf16;
  int64_t exact_alignment = 2;
};

struct LatentSpec {
  const char* name = "";
  int64_t num_heads = 4;
  int64_t num_kv_heads = 2;
  std::vector<PartSpec> keys = {PartSpec()};
  std::vector<PartSpec> values = {PartSpec()};
  int64_t page_tokens = 16;
  int64_t window = 0;
  bool causal = true;
  // The position of slot 0; if it is above 0, launches pass positions.
  int64_t first_position = 0;
  // Maps the default position of slot i, first_position + i, to the position
  // that the slot has. Null: slots have their default positions.
  int64_t (*position_of)(int64_t) = nullptr;
  // If true, no launch computes anything, so lifts need no matrices.
  bool tables_only = false;
  // The number of slots in the exact windows of the keys and of the values.
  int64_t key_exact = 0;
  int64_t value_exact = 0;
  // How many exact rows a page of the first arena holds; a page of the second
  // holds more.
  int64_t exact_page_rows = 3;
  int64_t sinks = 0;  // how many first tokens have exact rows
  // The number of slots that were evicted from each sequence. The places of
  // exact rows depend on it.
  int64_t evicted = 0;
  // Eviction units [Hkv]; empty: no slot metadata.
  std::vector<int32_t> unit_of_head = {};
  bool adds_mass = false;
  int64_t kept_weights = 0;  // number of floats of memory for attention weights
  // If set, rebuilt keys are rotated by the positions in the slot metadata. In
  // unit u, these positions are 1000 u greater than those of the slots.
  bool stored_positions = false;
  // If set, the cache has keys without their bias, and each query row has the
  // numbers with which attention adds it (AttentionKeyBias).
  bool key_bias = false;
  int64_t bias_tile_pairs = 11;
  int64_t bias_exact_pairs = 4;
  float bias_unit = 1.0f;
  // columns at the end of a query row that belong to no head
  int64_t query_gap = 3;
  // The number of tokens at the end of a sequence that have queries; 0: all.
  int64_t asked_tokens = 0;
  float score_cap = 0.0f;  // PagedAttentionParams::score_cap
  // The least ids of a page and of a side page. Arenas begin this many pages
  // before their memory, so that offsets of pages can be large without using
  // memory.
  int64_t first_page = 0;
  int64_t first_side_page = 0;
};

// The rows of one sequence in a launch: `count` new tokens after `start` cached
// ones.
struct LatentAsk {
  int64_t sequence;
  int64_t start;
  int64_t count;
  // How many pages at the front of the sequence's block table were released.
  int64_t dead_pages = 0;
  int64_t first_counted_row = 0;
  // The slots of each unit [U] that all rows see. Null: each row sees the slots
  // up to its own. Only Expected uses this.
  const std::vector<std::vector<int32_t>>* slots_of_unit = nullptr;
};

// A cache part with the tables and the memory that it points to.
class TestPart {
 public:
  // The part has pages [first_page, end_page) (LatentSpec::first_page).
  TestPart(const PartSpec& from, int64_t num_kv_heads, int64_t page_tokens,
           int64_t first_page, int64_t end_page, uint32_t seed);
  ~TestPart();
  TestPart(const TestPart&) = delete;
  TestPart& operator=(const TestPart&) = delete;

  static std::vector<float> Uniform(int64_t count, uint32_t seed, float low,
                                    float high);

  // Fills a slot with the contents for token `token`, which do not depend on
  // where the slot is.
  void Write(int64_t page, int64_t slot, uint32_t token);

  // Returns the numbers of a KV head's latent in a slot, in float64.
  std::vector<double> Read(int64_t kv_head, int64_t page, int64_t slot) const;

  // RingRowBytes returns the bytes of a row in a ring of exact rows. MakeRing
  // allocates memory for all rings; their arena begins `bytes_before` bytes
  // before it. MakeFresh allocates memory for the exact rows of a launch's own
  // tokens. At first, the memory contains no rows.
  int64_t RingRowBytes() const;
  void MakeRing(int64_t bytes, int64_t bytes_before);
  void MakeFresh(int64_t rows);
  // Returns the numbers of a token's exact row, which differ from its decoded
  // codes.
  std::vector<float> ExactNumbers(size_t group, uint32_t token) const;
  void WriteExact(const LatentPartArgs& rows, int64_t slot,
                  uint32_t token) const;
  void WriteRingRow(int64_t offset_bytes, uint32_t token) const;
  std::vector<double> ReadExact(int64_t kv_head, uint32_t token) const;

  int64_t WidthOf(int64_t kv_head) const;
  // The memory of the arenas of `part`, exact.ring and exact.fresh.
  const std::vector<char>& memory() const { return memory_; }
  const std::vector<char>& ring_memory() const { return ring_memory_; }
  const std::vector<char>& fresh_memory() const { return fresh_memory_; }

  const PartSpec spec;
  LatentPartArgs part;
  std::vector<int32_t> group_of_head;
  // columns of the query heads in q (for keys) or in out
  std::vector<int64_t> columns;
  ExactRowsArgs exact;

 private:
  void PlaceRegion(int64_t slot_bytes, int64_t granule, TileRegion* region,
                   int64_t* offset) const;
  // Writes random codes into a slot; the unused bits in its last byte are
  // random, too.
  void WriteRandomCodes(const LatentGroup& group, uint32_t seed,
                        char* slot) const;
  void Store(const std::vector<char>& bytes, const TileRegion& region,
             int64_t page, int64_t slot);
  std::vector<char> Load(int64_t count, const TileRegion& region, int64_t page,
                         int64_t slot) const;

  // Lays out groups of exact rows for `count` slots, from `offset` on.
  void LayRows(int64_t count, int64_t offset, LatentPartArgs* rows,
               std::vector<LatentGroup>* groups) const;

  void AddRuns(int64_t width);

  const uint32_t seed_;
  std::vector<LatentGroup> groups_;
  std::deque<std::vector<CodeRun>> runs_;
  std::vector<float> scale_;
  std::vector<float> minimum_;
  std::vector<char> memory_;
  std::vector<LatentGroup> ring_groups_;
  std::vector<LatentGroup> fresh_groups_;
  std::vector<char> ring_memory_;
  std::vector<char> fresh_memory_;
};

// A KeyRebuildArgs with the tables that it points to.
struct TestRebuild {
  KeyRebuildArgs rebuild;
  std::vector<std::vector<float>> up;
  std::vector<const float*> up_pointers;
  std::vector<float> bias;
  std::vector<int32_t> pair_dims;
  std::vector<double> radians;  // [heads or 1][pairs]
  std::vector<uint64_t> steps;

  TestRebuild(const TestPart& part, int64_t num_kv_heads, bool tables_only,
              uint32_t seed);
  ~TestRebuild();
  TestRebuild(const TestRebuild&) = delete;
  TestRebuild& operator=(const TestRebuild&) = delete;
};

// A ValueLiftArgs with the tables that it points to.
struct TestLift {
  ValueLiftArgs lift;
  std::vector<std::vector<float>> up;
  std::vector<const float*> up_pointers;

  TestLift(const TestPart& part, int64_t num_kv_heads, bool tables_only,
           uint32_t seed);
  ~TestLift();
  TestLift(const TestLift&) = delete;
  TestLift& operator=(const TestLift&) = delete;
};

// Does all three steps of attention: prepares the op, divides the step
// (DivideStep) and runs it.
absl::Status AttendOnDevice(TestStream& test, const PagedAttentionArgs& args,
                            Workspace& workspace);

class LatentCache {
 public:
  LatentCache(const LatentSpec& spec, std::vector<int64_t> lengths,
              uint32_t seed);
  ~LatentCache();

  // If set, called with the parameters of every launch.
  std::function<void(const PagedAttentionArgs&)> on_launch;

  // Makes Write and Expected use these threads, which must outlive the cache.
  // Null: only the caller's thread.
  void UseThreads(base::ThreadPool* threads) { threads_ = threads; }

  std::vector<int32_t>& table(int64_t sequence);
  const std::vector<int32_t>& side_table(int64_t sequence) const {
    return side_tables_[static_cast<size_t>(sequence)];
  }

  void Write(int64_t sequence, int64_t begin, int64_t end);
  // Rounds the queries to this type, for devices whose activations have it.
  void RoundQueries(DType dtype);
  // Multiplies number `column` of every query row by `factor`.
  void ScaleQueries(int64_t column, float factor);

  // Runs attention and returns the output rows of all requests, one after
  // another. Exact rows that these requests do not see are not written.
  std::vector<float> Attend(TestStream& test,
                            const std::vector<LatentAsk>& asks);

  // Like Attend, but calls `run` in place of the op.
  std::vector<float> Launch(
      const std::vector<LatentAsk>& asks,
      absl::FunctionRef<void(const PagedAttentionArgs&)> run);

  // Returns the parameters that do not depend on a launch's rows and sequences.
  PagedAttentionArgs Params();

  // Returns the attention mass of a sequence's slots, [U, tokens]. ClearMass
  // sets it to zeros.
  std::vector<float> Mass(int64_t sequence, int64_t tokens) const;
  void ClearMass();
  // Computes in float64 the mass that a request adds by its rows from
  // first_counted_row on.
  std::vector<double> ExpectedMass(const LatentAsk& ask, int64_t tokens) const;
  int64_t num_units() const { return metadata_.num_units; }
  const SlotMetadataArgs& metadata() const { return metadata_; }
  // The memory of the arena of metadata().
  const std::vector<char>& metadata_memory() const { return metadata_memory_; }
  // Overwrites this memory. `memory` must have the same size.
  void SetMetadata(const std::vector<char>& memory) {
    std::copy(memory.begin(), memory.end(), metadata_memory_.begin());
  }
  const std::deque<TestPart>& parts() const { return parts_; }

  // Returns the output of a request by definition, computed in float64 from the
  // contents of the cache. Columns that belong to no head are NaN. Attention
  // rounds queries that it multiplies by codes to digits (code_digits.h), which
  // makes scores inexact. If `score_deviation` is not null, it is set to the
  // largest standard deviation of these errors of scores.
  std::vector<double> Expected(const LatentAsk& ask,
                               double* score_deviation = nullptr) const;

 private:
  static constexpr float kScale = 0.3f;

  // Calls work(begin, end) for ranges that cover [0, count), on the threads of
  // UseThreads.
  void ForRanges(int64_t count,
                 absl::FunctionRef<void(int64_t, int64_t)> work) const;
  // Returns the first token of a sequence that has a query.
  int64_t FirstAsked(int64_t sequence) const;
  const float* QueryOf(int64_t sequence, int64_t token) const;
  int64_t PositionOf(int64_t position) const;
  void MakeMetadata(int64_t end_page);
  struct Weights {
    std::vector<int64_t> slots;  // slots that the row sees
    std::vector<double> shares;
    double score_deviation;  // see Expected
  };
  // The keys and values that the rows and heads of one request have read of one
  // KV head. Each is computed once. The index has the slot, the part and
  // whether the row is exact.
  struct Known {
    int64_t kv_head = -1;
    std::unordered_map<int64_t, std::vector<double>> rows;
  };
  Weights WeightsOf(const LatentAsk& ask, int64_t row, int64_t head,
                    Known& known) const;
  int64_t Pages(int64_t tokens) const;
  int64_t PageOf(int64_t sequence, int64_t token) const;

  // The exact rows of the keys or the values; they are in two arenas. The first
  // page of an arena belongs to no sequence.
  struct ExactSide {
    ExactSlots slots;
    std::vector<ExactSegment> segments;
    int64_t num_pages = 0;  // pages per sequence
    int64_t memory_bytes = 0;
    int64_t bytes_before = 0;  // see TestPart::MakeRing
  };
  const ExactSide& ExactOf(bool is_key) const {
    return is_key ? key_exact_ : value_exact_;
  }
  ExactSide MakeExactSide(bool is_key, int64_t first_page) const;
  void MakeSidePages();
  static uint32_t TokenId(int64_t sequence, int64_t token);

  void WriteExact(const std::vector<LatentAsk>& asks, int64_t num_rows);

  // Returns compute(latent) of slot `slot` as the query at slot `own` reads the
  // latent: from an exact row or decoded from codes.
  const std::vector<double>& RowOf(
      Known& known, size_t p, int64_t kv_head, int64_t sequence, int64_t own,
      int64_t slot,
      absl::FunctionRef<std::vector<double>(const std::vector<double>&)>
          compute) const;

  void AddPart(const PartSpec& spec, int64_t end_page, bool is_key);

  // Assigns the columns of q and of the output, by part and then by head, with
  // some columns that belong to no head.
  void PlaceColumns();

  std::vector<double> KeyOf(size_t p, size_t rebuild_index, int64_t kv_head,
                            const std::vector<double>& latent,
                            int64_t position) const;

  static std::vector<double> ValueOf(const TestLift* lift, int64_t kv_head,
                                     const std::vector<double>& latent);

  // Returns the row's score_deviation.
  double AddExpected(const LatentAsk& ask, int64_t row, int64_t head,
                     Known& known, double* out) const;

  void MakeKeyBias();
  // Returns what the key bias adds to the product of a query row and a key.
  double KeyBiasOf(const float* q, int64_t head, int64_t position) const;

  const LatentSpec spec_;
  const std::vector<int64_t> lengths_;
  const uint32_t seed_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::vector<int32_t>> side_tables_;
  ExactSide key_exact_;
  ExactSide value_exact_;
  std::vector<std::vector<int64_t>> positions_;
  std::deque<TestPart> parts_;  // keys, then values
  std::deque<TestRebuild> rebuilds_;
  std::deque<TestLift> lifts_;
  std::vector<AttentionKeyPartArgs> keys_;
  std::vector<AttentionValuePartArgs> values_;
  AttentionKeyBias key_bias_;
  std::vector<double> bias_radians_;  // [Hkv][pairs]
  std::vector<uint64_t> bias_steps_;
  std::vector<int64_t> bias_columns_;
  SlotMetadataArgs metadata_;
  std::vector<char> metadata_memory_;
  int64_t q_stride_ = 0;
  int64_t out_stride_ = 0;
  // the queries of each sequence, from FirstAsked on
  std::vector<std::vector<float>> q_;
  base::ThreadPool* threads_ = nullptr;
};

// Returns the largest relative error of one head's numbers in one row. The
// error is infinite if only one of `expected` and `got` has NaN at some place.
double WorstError(const PagedAttentionArgs& params,
                  const std::vector<double>& expected,
                  const std::vector<float>& got);

}  // namespace kvasir::kernels
