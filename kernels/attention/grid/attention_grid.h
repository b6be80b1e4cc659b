// How a launch of paged_attention is cut into units of work, and how a thread's
// scratch is divided. Host tables only; knows no instruction set. C++17.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/attention/grid/attention_mass.h"
#include "kernels/attention/params/paged_attention.h"
#include "kernels/latents/code_pack.h"

namespace kvasir::kernels {

// Channels of a latent that are brought into cache at a time, and runs of codes
// among them, at most.
inline constexpr int64_t kChunkChannels = 128;
inline constexpr int64_t kChunkPieces = 16;
// A row's queries of a part are held for the whole unit up to this width; wider
// ones come chunk by chunk for each block.
inline constexpr int64_t kHeldQueryWidth = 512;
// Runs whose sums over rows of `up` are held for the whole unit.
inline constexpr int64_t kHeldLiftSums = 8192;
// Rows of a panel.
inline constexpr int64_t kAttentionMaxRows = 128;
// Rows of all panels of a unit.
inline constexpr int64_t kMostUnitRows = 2048;
// Panels of fewer rows waste the register tile: then tiles that were made are
// not kept for others.
inline constexpr int64_t kLeastPanelRows = 8;
// Units are divided further if more than one part in as many of the threads'
// time would be idle.
inline constexpr int64_t kIdleShare = 8;
// Fewer rows than this are not worth holding the angles of a block.
inline constexpr int64_t kRowsWithAngles = 4;
// KV heads at most that are brought together only because their keys turn by
// the same angles: fewer units, but angles cost as much as half a key.
inline constexpr int64_t kHeadsPerAngles = 4;
// KV heads are brought together only because their latents lie side by side if
// no unit becomes more than one part in as many of a thread's work.
inline constexpr int64_t kUnitsPerThread = 4;
// Rows of units whose keys need no rebuilding: more would only take cache.
inline constexpr int64_t kAbsorbedRows = 64;

// The part of a run that lies in a chunk.
struct CodePiece {
  int64_t run = 0;
  int64_t begin = 0;  // channel
  int64_t width = 0;
  CodePlace place;  // of the piece's first code
  // The same, each plane counted from ChunkBytes::begin.
  CodePlace in_chunk;
  bool starts_run = false;
  bool ends_run = false;
};

// Where the codes of a chunk lie in a slot, plane by plane.
struct ChunkBytes {
  int64_t begin[4] = {0, 0, 0, 0};
  int64_t end[4] = {0, 0, 0, 0};  // no code of the plane: begin
  // All planes have the bytes of all: these are read once.
  bool together = false;
};

// How the codes of 16 channels are taken out of a slot's 16-bit words by
// vectors of as many lanes, whatever their bits: a lane's word, the low bits in
// its lower half and the high bits in its upper one, shifted right, and rotated
// right for the high bits.
struct alignas(64) CodeLanes {
  static constexpr int64_t kChannels = 16;
  // More are too many for the two registers that a slot is looked up in.
  static constexpr int64_t kMostSlotBytes = 128;

  uint32_t words[kChannels];  // two numbers of words, of 16 bits each
  uint32_t shifts[kChannels];
  uint32_t turns[kChannels];
  uint32_t low_mask[kChannels];
  uint32_t mask[kChannels];  // 0: nothing is stored, the code is 0
};

// Of channels that a slot has something of.
struct LatentChunk {
  int64_t begin = 0;  // channel
  int64_t width = 0;
  int64_t first_piece = 0;
  int64_t num_pieces = 0;  // 0: numbers
  ChunkBytes bytes;
  // Of static ranges: vectors of channels from `lanes_begin` on, which cover
  // whole tiles of 32 columns; what is not the chunk's is 0. None: too many
  // bytes.
  int64_t lanes_begin = 0;
  int64_t first_lanes = 0;
  int64_t num_lanes = 0;
  int64_t slot_bytes = 0;  // of all of the slot's codes
};

// Heads of a unit that use one group (and, where keys are rebuilt, one KV
// head).
struct HeadSpan {
  int64_t group;
  int64_t kv_head;
  int64_t begin;  // among the unit's heads
  int64_t end;
};

// Query heads that are computed together.
struct HeadSlice {
  int64_t first_head;  // in AttentionGrid::heads()
  int64_t num_heads;
  int64_t first_spans;  // in the grid's table of spans: one entry per part
  // Every part has one span: rows may lie in any order.
  bool one_span_each;
};

// Offsets in floats from the start of a thread's scratch.
struct AttentionScratch {
  // [kChunkChannels, 64], or [64, kChunkChannels], or words of codes [.., 64]
  int64_t tile;
  int64_t scales;  // [kChunkPieces, 64]
  int64_t minima;  // [kChunkPieces, 64]
  int64_t keys;    // [parts][d, 64]: rebuilt
  int64_t values;  // [parts][64, d padded]: lifted
  // [d, 64] or [64, d padded]: a run of codes before its scale; scaled lifts
  int64_t lift_raw;
  int64_t cosines;       // [pairs, 64]
  int64_t sines;         // [pairs, 64]
  int64_t lift_sums;     // of runs over rows of `up`
  int64_t column_sums;   // [d]: of a run over columns of `up`
  int64_t scores;        // [rows, 64]
  int64_t scores_part;   // [rows, 64]: of one part; scaled weights
  int64_t scores_exact;  // [rows, 64]: of exact rows, beside codes
  int64_t raw;           // [rows, 64]: a run of codes before its scale
  int64_t states;        // [panels] of PanelState
  int64_t floats;        // of all
};

// What stays of a panel's rows from block to block. Offsets in floats from the
// start of the panel's state.
struct PanelState {
  int64_t q;           // [parts][rows, width of the part]
  int64_t out;         // [rows, out_width], of the current split
  int64_t out_minima;  // [rows, minima_width]
  int64_t query_sums;  // [parts][rows, runs of the part]
  int64_t max;         // [rows]
  int64_t sum;         // [rows]
  int64_t total_max;   // [rows]: of the splits before
  int64_t total_sum;   // [rows]
  int64_t floats;      // of all
};

struct AttentionUnit {
  const AttentionSequence* sequence;
  const HeadSlice* slice;
  int64_t query_begin;
  int64_t num_queries;
  int64_t rows() const { return slice->num_heads * num_queries; }
};

// What is the same for every launch is made once: parts, chunks, slices and
// sets of heads, scratch. `Bind` sets what a step gives.
//
// Exact rows are parts like others, of numbers: those of key part p are key
// part num_stored_keys() + p, and values likewise.
// Threads: one at a time may call Bind; the rest between two calls of it by
// any.
class AttentionGrid {
 public:
  // Units are as many as keep `threads` threads busy, if there are rows enough.
  // `params` outlives it with all that it points to.
  explicit AttentionGrid(const PagedAttentionArgs& params, int threads = 1);
  AttentionGrid(const AttentionGrid&) = delete;
  AttentionGrid& operator=(const AttentionGrid&) = delete;

  // Of a launch. `work`: WorkOn them.
  struct Sequences {
    const AttentionSequence* data = nullptr;
    int64_t count = 0;
    int64_t work = 0;
  };
  struct Rows {
    const float* q = nullptr;
    float* out = nullptr;
    Sequences sequences;
    float* mass = nullptr;  // memory of mass().floats
  };
  // For the next launch.
  void Bind(const Rows& rows);
  Sequences sequences() const {
    return {params_.sequences, params_.num_sequences, work_};
  }
  // Slots that rows read, of all sequences; host memory.
  int64_t WorkOn(const AttentionSequence* sequences, int64_t count) const;
  // Whether steps over the same sequences are divided in the same way.
  bool DividesAs(const AttentionGrid& other) const;

  // What every part needs to know of itself.
  struct KeyPart {
    bool codes = false;
    bool fixed_ranges = false;
    int64_t width = 0;  // of a row's queries: widest group, or d
    int64_t held_width = 0;
    int64_t num_sums = 0;      // of a row's queries
    int64_t lift_runs = 0;     // sums for each row of `up`
    int64_t tile_offset = 0;   // behind scratch.keys, in floats
    int64_t q_offset = 0;      // behind a panel's q
    int64_t sums_offset = 0;   // behind a panel's query_sums
    int64_t lift_offset = -1;  // behind scratch.lift_sums; below 0: not held
    int64_t first_group = 0;   // in the table of chunks
    // Exact rows: a row's queries are those of the part they stand beside.
    bool shares_queries = false;
  };
  struct ValuePart {
    bool codes = false;
    bool fixed_ranges = false;
    // Static ranges beside exact rows: the first of its minima is the sum of
    // weights, and ranges are applied at the end of a split.
    bool sums_weights = false;
    bool lifted = false;
    int64_t tile_stride = 0;    // of lifted values: d padded
    int64_t tile_offset = 0;    // behind scratch.values, in floats
    int64_t out_offset = 0;     // in a row of `out`
    int64_t minima_offset = 0;  // in a row of `out_minima`
    int64_t first_group = 0;
  };
  // Where the rows of a part of exact rows lie.
  struct ExactPart {
    const LatentPartArgs* ring = nullptr;  // the part's own view
    const LatentPartArgs* fresh = nullptr;
    const ExactSlots* slots = nullptr;
  };

  // With the parts of exact rows.
  const PagedAttentionArgs& params() const { return params_; }
  // Without.
  PagedAttentionArgs stored_params() const {
    PagedAttentionArgs params = params_;
    params.num_key_parts = num_stored_keys_;
    params.num_value_parts = num_stored_values_;
    return params;
  }
  int threads() const { return threads_; }
  int64_t num_stored_keys() const { return num_stored_keys_; }
  int64_t num_stored_values() const { return num_stored_values_; }
  // Null for a part of the cache.
  const ExactPart* exact(const LatentPartArgs& part) const {
    for (const ExactPart& each : exact_) {
      if (each.ring == &part) return &each;
    }
    return nullptr;
  }
  const KeyPart& key(int64_t part) const {
    return keys_[static_cast<size_t>(part)];
  }
  const ValuePart& value(int64_t part) const {
    return values_[static_cast<size_t>(part)];
  }
  const int64_t* heads() const { return heads_.data(); }
  const HeadSlice& slice(int64_t index) const {
    return slices_[static_cast<size_t>(index)];
  }
  // Attention mass: nothing where it is not asked for.
  const MassPlan& mass() const { return mass_; }
  float* mass_memory() const { return mass_memory_; }
  // Of a row's softmax [Hq]: maxima, 1 / sums.
  float* MassMaximaOf(int64_t row) const {
    return mass_memory_ + mass_.maxima + row * params_.num_heads;
  }
  int64_t& MassPendingOf(int64_t row) const {
    return reinterpret_cast<int64_t*>(mass_memory_ + mass_.pending)[row];
  }
  float* MassInversesOf(int64_t row) const {
    return mass_memory_ + mass_.inverses + row * params_.num_heads;
  }
  int64_t heads_per_kv() const { return heads_per_kv_; }
  // At least one row fits kAttentionScratchBytes.
  bool fits() const { return max_rows_ > 0; }
  int64_t out_width() const { return out_width_; }
  int64_t minima_width() const { return minima_width_; }
  // Angles of a block are held for all heads; else there is room for those of
  // one pair.
  bool holds_angles() const { return holds_angles_; }
  // Sums of lifts that are held; behind them is room for those of one run.
  int64_t held_lift_sums() const { return held_lift_sums_; }
  const AttentionScratch& scratch() const { return scratch_; }
  const PanelState& state() const { return state_; }

  // Spans of a slice in a part (key parts first), those of a group adjacent.
  struct Spans {
    const HeadSpan* begin;
    const HeadSpan* end;
  };
  Spans spans(const HeadSlice& slice, int64_t part) const {
    const auto index = static_cast<size_t>(slice.first_spans + part);
    return {spans_.data() + span_begin_[index],
            spans_.data() + span_begin_[index + 1]};
  }

  // Chunks of a group; `first_group` is that of its part.
  struct Chunks {
    const LatentChunk* begin;
    const LatentChunk* end;
  };
  Chunks chunks(int64_t first_group, int64_t group) const {
    const auto index = static_cast<size_t>(first_group + group);
    return {chunks_.data() + chunk_begin_[index],
            chunks_.data() + chunk_begin_[index + 1]};
  }
  const CodePiece* pieces(const LatentChunk& chunk) const {
    return pieces_.data() + chunk.first_piece;
  }
  const CodeLanes* lanes(const LatentChunk& chunk) const {
    return lanes_.data() + chunk.first_lanes;
  }

  // How a sequence's rows are cut: every slice times every tile of queries.
  struct Cut {
    const HeadSlice* slices;
    int64_t num_slices;
    int64_t num_tiles;
    int64_t units() const { return num_slices * num_tiles; }
  };
  // `work`: of all sequences of the launch.
  Cut CutOf(const AttentionSequence& sequence, int64_t work) const;
  Cut CutOf(const AttentionSequence& sequence) const {
    return CutOf(sequence, work_);
  }

  // A unit's rows are computed panel by panel: those of as many queries as fit.
  int64_t PanelsOf(const AttentionUnit& unit) const;
  AttentionUnit PanelOf(const AttentionUnit& unit, int64_t panel) const;

 private:
  void AddExactParts();
  void AddChunks(const LatentPartArgs& part);
  void PlacePieces(LatentChunk* chunk);
  void AddLanes(const LatentGroup& group, LatentChunk* chunk);
  void DescribeParts();
  void DescribeKey(int64_t index);
  void DescribeValue(int64_t index);
  std::vector<std::vector<int64_t>> FindClusters();
  void PlanMass(const std::vector<std::vector<int64_t>>& clusters);
  bool SharesAngles() const;
  void AddSets(const std::vector<std::vector<int64_t>>& clusters);
  int64_t WorkOf(const AttentionSequence& sequence) const;
  int64_t ClustersTogether(const AttentionSequence& sequence,
                           int64_t work_of_all) const;
  void AddSlices(const std::vector<int64_t>& kv_heads);
  void AddSlice(int64_t first, int64_t count);
  void DivideScratch();
  void ChooseRows();
  int64_t MostRows() const;
  bool Fits(int64_t rows) const;
  AttentionScratch Divide(int64_t rows) const;
  PanelState DivideState(int64_t rows) const;
  void PlaceTiles(bool own);
  int64_t SharesOf(int64_t panels, int64_t num_slices) const;
  bool makes_tiles() const { return rebuilds_ || lifts_; }

  PagedAttentionArgs params_;
  const int64_t num_stored_keys_;
  const int64_t num_stored_values_;
  // Behind params_, where there are exact rows.
  std::vector<AttentionKeyPartArgs> key_parts_;
  std::vector<AttentionValuePartArgs> value_parts_;
  std::vector<ExactPart> exact_;
  const int64_t heads_per_kv_;
  const int threads_;
  int64_t num_groups_ = 0;  // of the parts described so far
  bool rebuilds_ = false;
  bool lifts_ = false;
  bool codes_ = false;
  // Codes with ranges in slots that are multiplied as they are.
  bool scores_codes_ = false;
  bool sums_codes_ = false;
  // Every part has tiles of its own, which may serve many panels.
  bool own_tiles_ = true;
  int64_t key_tiles_ = 0;    // floats
  int64_t value_tiles_ = 0;  // floats
  int64_t max_rows_ = 0;     // of a panel
  int64_t max_panels_ = 1;   // of a unit
  int64_t out_width_ = 0;
  int64_t minima_width_ = 0;
  int64_t held_lift_sums_ = 0;
  bool holds_angles_ = true;
  AttentionScratch scratch_ = {};
  PanelState state_ = {};
  std::vector<KeyPart> keys_;
  std::vector<ValuePart> values_;
  std::vector<int64_t> heads_;  // query heads, slice after slice
  std::vector<HeadSlice> slices_;
  // Those of clusters; then, where tiles are made, those of single KV heads, or
  // else those of sets.
  size_t num_cluster_slices_ = 0;
  size_t num_head_slices_ = 0;  // of single KV heads, or sets
  int64_t num_clusters_ = 0;
  int64_t widest_cluster_ = 0;  // query heads
  // Neighbouring clusters, in sets of nearly one size: side by side in a page
  // where groups are numbered as heads are.
  struct ClusterSets {
    int64_t size;  // clusters of a set, at most
    size_t first_slice;
    int64_t num_slices;
  };
  std::vector<ClusterSets> sets_;
  int64_t work_ = 0;  // of all sequences
  std::vector<HeadSpan> spans_;
  std::vector<size_t> span_begin_;
  std::vector<LatentChunk> chunks_;
  std::vector<size_t> chunk_begin_;
  std::vector<CodePiece> pieces_;
  std::vector<CodeLanes> lanes_;
  MassPlan mass_;  // its slices are the last ones
  float* mass_memory_ = nullptr;
};

// Walks over all units of a launch, in one fixed order.
class UnitCursor {
 public:
  explicit UnitCursor(const AttentionGrid& grid)
      : UnitCursor(grid, grid.sequences()) {}
  UnitCursor(const AttentionGrid& grid,
             const AttentionGrid::Sequences& sequences)
      : grid_(grid), sequences_(sequences) {}
  // Moves forward to unit `index`; false when there are fewer.
  bool MoveTo(int64_t index, AttentionUnit* unit);

 private:
  const AttentionGrid& grid_;
  const AttentionGrid::Sequences sequences_;
  int64_t sequence_ = 0;
  int64_t first_ = 0;  // index of the sequence's first unit
};

// Slots that any row of a unit sees.
inline VisibleRange UnitSlots(const PagedAttentionArgs& params,
                              const AttentionUnit& unit) {
  const VisibleRange first =
      VisibleSlots(params, *unit.sequence, unit.query_begin);
  const VisibleRange last = VisibleSlots(
      params, *unit.sequence, unit.query_begin + unit.num_queries - 1);
  return {first.begin, last.end};
}

// Whether threads take splits of long contexts, not whole units: there are
// fewer units than threads, each of one panel, and all of them see something.
bool TakesSplits(const AttentionGrid& grid,
                 const AttentionGrid::Sequences& sequences);

// Softmax of a unit's rows over the splits merged so far; the output itself is
// in params.out.
struct AttentionTotal {
  float* max;  // [rows]
  float* sum;  // [rows]
};

}  // namespace kvasir::kernels
