// How a launch of paged_attention is divided into units of work, and how a
// thread's scratch memory is divided. All tables are in host memory and are the
// same for every instruction set. C++17.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/grid/attention_mass.h"
#include "kernels/attention/grid/grid_tables.h"
#include "kernels/attention/params/paged_attention.h"

namespace kvasir::kernels {

// The tables that are the same for all launches of a layer and are computed
// once: parts, chunks of channels, slices of query heads, and the layout of
// scratch. `Bind` sets the arguments that change with every step.
//
// Exact rows are handled as additional parts. Key part num_stored_keys() + p
// has the exact rows of key part p, and value part num_stored_values() + p has
// those of value part p.
//
// Threads: while a thread calls Bind, no other thread may use the grid. Between
// two calls of Bind, any thread may call the other functions.
class AttentionGrid {
 public:
  // Makes enough units to keep `threads` threads busy, if there are enough
  // rows. `params` and all that it points to must outlive the grid.
  explicit AttentionGrid(const PagedAttentionArgs& params, int threads = 1);
  AttentionGrid(const AttentionGrid&) = delete;
  AttentionGrid& operator=(const AttentionGrid&) = delete;

  // The sequences of a launch. `work` is the result of WorkOn for them.
  struct Sequences {
    const AttentionSequence* data = nullptr;
    int64_t count = 0;
    int64_t work = 0;
  };
  struct Rows {
    const float* q = nullptr;
    float* out = nullptr;
    Sequences sequences;
    float* mass = nullptr;  // mass().floats floats, for attention mass
  };
  void Bind(const Rows& rows);
  Sequences sequences() const {
    return {params_.sequences, params_.num_sequences, work_};
  }
  // Returns the number of slots that a row may read, summed over all rows. The
  // sequences must be in host memory.
  int64_t WorkOn(const AttentionSequence* sequences, int64_t count) const;
  // Returns whether this grid and `other` divide every list of sequences in the
  // same way.
  bool DividesAs(const AttentionGrid& other) const;

  struct KeyPart {
    bool codes = false;
    bool fixed_ranges = false;  // true if ranges are static
    // The length of a row's query: the width of the widest group, or the head
    // dimension if keys are rebuilt.
    int64_t width = 0;
    // Size of a row's query in the panel's state, in 32-bit words. The query is
    // stored as float32 numbers, or as digits if multiplies_codes.
    int64_t held_width = 0;
    // True: the state has the whole query. False: it has one chunk of the query
    // at a time.
    bool holds = true;
    // True if keys are absorbed and stored as codes. Then codes are multiplied
    // by the digits of queries (code_digits.h).
    bool multiplies_codes = false;
    const int8_t* levels = nullptr;  // the levels' integers; null: no levels
    float level_step = 1.0f;
    // The number of sums of a row's query that are multiplied by minima of
    // codes: one for each run, or a single one if ranges are static.
    int64_t num_sums = 0;
    // If keys are rebuilt: the number of sums of a row of `up` that are
    // multiplied by minima.
    int64_t lift_runs = 0;
    int64_t tile_offset = 0;  // offset from scratch.keys, in floats
    int64_t q_offset = 0;     // offset from PanelState::q
    int64_t sums_offset = 0;  // offset from PanelState::query_sums
    // Offset from scratch.lift_sums. Negative if scratch does not hold
    // the sums.
    int64_t lift_offset = -1;
    int64_t first_group = 0;  // index of the part's first group in chunk_begin_
    // True for a part of exact rows that uses the same copy of the queries as
    // its stored part.
    bool shares_queries = false;
  };
  struct ValuePart {
    bool codes = false;
    bool fixed_ranges = false;  // true if ranges are static
    // True for a part that has static ranges and also exact rows. Its ranges
    // are applied at the end of each split, and its first number in out_minima
    // is the sum of weights.
    bool sums_weights = false;
    bool lifted = false;
    const int8_t* levels = nullptr;
    float level_step = 1.0f;
    // The head dimension of lifted values, rounded up to whole register tiles.
    int64_t tile_stride = 0;
    int64_t tile_offset = 0;    // offset from scratch.values, in floats
    int64_t out_offset = 0;     // offset in a row of PanelState::out
    int64_t minima_offset = 0;  // offset in a row of PanelState::out_minima
    int64_t first_group = 0;
  };
  // The memory that holds the exact rows of a part.
  struct ExactPart {
    // The rows in side pages. exact() finds this entry by their address.
    const LatentPartArgs* ring = nullptr;
    const LatentPartArgs* fresh = nullptr;
    const ExactSlots* slots = nullptr;
  };

  // The parameters, including the parts of exact rows.
  const PagedAttentionArgs& params() const { return params_; }
  // The parameters without the parts of exact rows.
  PagedAttentionArgs stored_params() const {
    PagedAttentionArgs params = params_;
    params.num_key_parts = num_stored_keys_;
    params.num_value_parts = num_stored_values_;
    return params;
  }
  int threads() const { return threads_; }
  int64_t num_stored_keys() const { return num_stored_keys_; }
  int64_t num_stored_values() const { return num_stored_values_; }
  // Returns the memory of exact rows that `part` views; null if `part` views
  // the cache.
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
  // How attention mass is added. Empty if the layer adds no mass.
  const MassPlan& mass() const { return mass_; }
  float* mass_memory() const { return mass_memory_; }
  // Returns the softmax maxima of row `row` of q, one per query head [Hq].
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
  // Returns whether at least one row fits into kAttentionScratchBytes.
  bool fits() const { return max_rows_ > 0; }
  int64_t out_width() const { return out_width_; }
  int64_t minima_width() const { return minima_width_; }
  // Returns whether the scratch holds the rotation angles of all pairs for a
  // block, so that all heads share them. Otherwise it holds the angles of
  // one pair.
  bool holds_angles() const { return holds_angles_; }
  // How many sums of rows of `up` the scratch holds for a whole unit. Other
  // sums are computed again for each run and stored after the held sums.
  int64_t held_lift_sums() const { return held_lift_sums_; }
  // How many numbers of a row of q are for the key bias; 0 if there is none.
  int64_t key_bias_columns() const {
    const AttentionKeyBias* const bias = params_.key_bias;
    return bias == nullptr
               ? 0
               : KeyBiasColumns(bias->tile_pairs, bias->exact_pairs);
  }
  // Returns the tables that KeyBiasTurns made for one KV head.
  const float* key_bias_turns(int64_t kv_head) const {
    return key_bias_turns_.data() +
           kv_head * params_.key_bias->exact_pairs * 2 * kKeyBiasTile;
  }
  const AttentionScratch& scratch() const { return scratch_; }
  const PanelState& state() const { return state_; }

  // The spans into which a slice's heads are divided for one part. `part` is an
  // index that counts first the key parts and then the value parts. Spans of
  // the same group are adjacent.
  struct Spans {
    const HeadSpan* begin;
    const HeadSpan* end;
  };
  Spans spans(const HeadSlice& slice, int64_t part) const {
    const auto index = static_cast<size_t>(slice.first_spans + part);
    return {spans_.data() + span_begin_[index],
            spans_.data() + span_begin_[index + 1]};
  }

  // The chunks of a group. `first_group` is KeyPart::first_group or
  // ValuePart::first_group.
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

  // How a sequence's rows are divided: into one unit for every slice of heads
  // and every tile of queries.
  struct Cut {
    const HeadSlice* slices;
    int64_t num_slices;
    int64_t num_tiles;
    int64_t units() const { return num_slices * num_tiles; }
  };
  // Divides the rows of a sequence. `work` is the result of WorkOn for all
  // sequences of the launch.
  Cut CutOf(const AttentionSequence& sequence, int64_t work) const;
  Cut CutOf(const AttentionSequence& sequence) const {
    return CutOf(sequence, work_);
  }

  // A unit's rows are computed panel by panel. PanelsOf returns the number of
  // panels, and PanelOf the part of the unit that is in one panel.
  int64_t PanelsOf(const AttentionUnit& unit) const;
  AttentionUnit PanelOf(const AttentionUnit& unit, int64_t panel) const;

 private:
  void AddExactParts();
  void AddChunks(const LatentPartArgs& part);
  void PlacePieces(LatentChunk* chunk);
  const int8_t* AddLevels(const LatentPartArgs& part, float* step);
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
  // params_ points to these two lists if there are exact rows.
  std::vector<AttentionKeyPartArgs> key_parts_;
  std::vector<AttentionValuePartArgs> value_parts_;
  std::vector<ExactPart> exact_;
  const int64_t heads_per_kv_;
  const int threads_;
  int64_t num_groups_ = 0;  // number of groups in the parts described so far
  bool rebuilds_ = false;
  bool lifts_ = false;
  bool codes_ = false;
  // True if some key part is absorbed and has codes whose ranges are stored in
  // the slots. Such codes are multiplied before their scale is applied.
  bool scores_codes_ = false;
  // True if some value part is absorbed and has codes.
  bool sums_codes_ = false;
  // True: every part has its own tile, so a rebuilt or lifted block can be used
  // for several panels.
  bool own_tiles_ = true;
  int64_t key_tiles_ = 0;    // floats of the tiles of rebuilt keys
  int64_t value_tiles_ = 0;  // floats of the tiles of lifted values
  int64_t max_rows_ = 0;     // most rows of a panel
  int64_t max_panels_ = 1;   // most panels of a unit
  int64_t out_width_ = 0;
  int64_t minima_width_ = 0;
  int64_t held_lift_sums_ = 0;
  bool holds_angles_ = true;
  AttentionScratch scratch_ = {};
  PanelState state_ = {};
  std::vector<KeyPart> keys_;
  std::vector<ValuePart> values_;
  std::vector<int64_t> heads_;  // query heads, slice by slice
  std::vector<HeadSlice> slices_;
  // A cluster is a set of KV heads that share a group or rotation angles
  // (FindClusters). slices_ begins with the slices of clusters. Next are the
  // slices of single KV heads if keys are rebuilt or values lifted, or
  // otherwise the slices of sets of clusters.
  size_t num_cluster_slices_ = 0;
  size_t num_head_slices_ = 0;  // slices of single KV heads, or of sets
  int64_t num_clusters_ = 0;
  int64_t widest_cluster_ = 0;  // most query heads of a cluster
  // A division of the clusters into sets of nearly equal size. A set has
  // neighbouring clusters. If groups are numbered in the order of heads, the
  // latents of a set are adjacent in a page.
  struct ClusterSets {
    int64_t size;  // the most clusters of a set
    size_t first_slice;
    int64_t num_slices;
  };
  std::vector<ClusterSets> sets_;
  int64_t work_ = 0;  // result of WorkOn for all sequences of the launch
  std::vector<HeadSpan> spans_;
  std::vector<size_t> span_begin_;
  std::vector<LatentChunk> chunks_;
  std::vector<size_t> chunk_begin_;
  std::vector<CodePiece> pieces_;
  std::vector<float> key_bias_turns_;
  // The levels of key parts, then of value parts. Their addresses do not
  // change, because KeyPart and ValuePart point to them.
  std::vector<LevelIntegers> levels_;
  MassPlan mass_;  // its slices are at the end of slices_
  float* mass_memory_ = nullptr;
};

// Visits all units of a launch in one fixed order.
class UnitCursor {
 public:
  explicit UnitCursor(const AttentionGrid& grid)
      : UnitCursor(grid, grid.sequences()) {}
  UnitCursor(const AttentionGrid& grid,
             const AttentionGrid::Sequences& sequences)
      : grid_(grid), sequences_(sequences) {}
  // Moves forward to unit `index` and sets `*unit`. Returns false if the launch
  // has no such unit.
  bool MoveTo(int64_t index, AttentionUnit* unit);

 private:
  const AttentionGrid& grid_;
  const AttentionGrid::Sequences sequences_;
  int64_t sequence_ = 0;
  int64_t first_ = 0;  // index of the sequence's first unit
};

// Returns the slots that at least one row of a unit sees.
inline VisibleRange UnitSlots(const PagedAttentionArgs& params,
                              const AttentionUnit& unit) {
  const VisibleRange first =
      VisibleSlots(params, *unit.sequence, unit.query_begin);
  const VisibleRange last = VisibleSlots(
      params, *unit.sequence, unit.query_begin + unit.num_queries - 1);
  return {first.begin, last.end};
}

// Returns whether threads take splits of contexts instead of whole units. They
// do so if all these conditions hold:
// - there are fewer units than threads,
// - each unit has a single panel and sees at least one slot, and
// - some unit sees more slots than a split has.
bool TakesSplits(const AttentionGrid& grid,
                 const AttentionGrid::Sequences& sequences);

// The maximum and sum of each row's softmax, over all splits of a unit that
// were merged so far. The merged output itself is in params.out.
struct AttentionTotal {
  float* max;  // [rows]
  float* sum;  // [rows]
};

}  // namespace kvasir::kernels
