#include "kernels/attention/grid/attention_grid.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "kernels/attention/grid/key_bias_turns.h"

namespace kvasir::kernels {
namespace {

// Rounds up to whole cache lines.
int64_t PadLine(int64_t floats) { return (floats + 15) / 16 * 16; }
// Rounds up to whole register tiles.
int64_t PadTile(int64_t columns) { return (columns + 31) / 32 * 32; }

int64_t WidestGroup(const LatentPartArgs& part) {
  int64_t width = 0;
  for (int64_t g = 0; g < part.num_groups; ++g) {
    width = std::max(width, part.groups[g].width);
  }
  return width;
}
int64_t MostRuns(const LatentPartArgs& part) {
  int64_t runs = 0;
  for (int64_t g = 0; g < part.num_groups; ++g) {
    runs = std::max(runs, part.groups[g].num_runs);
  }
  return runs;
}

void CoverPlane(int plane, int64_t bit, int64_t num_bits, ChunkBytes* bytes) {
  const int64_t begin = bit / 8;
  const int64_t end = (bit + num_bits + 7) / 8;
  const bool empty = bytes->begin[plane] == bytes->end[plane];
  bytes->begin[plane] = empty ? begin : std::min(bytes->begin[plane], begin);
  bytes->end[plane] = empty ? end : std::max(bytes->end[plane], end);
}

void Cover(const CodePiece& piece, ChunkBytes* bytes) {
  const CodePlace& place = piece.place;
  CoverPlane(PlaneIndex(place.low_bits), place.low_bit,
             piece.width * place.low_bits, bytes);
  if (place.high_bits == 0) return;
  CoverPlane(PlaneIndex(place.high_bits), place.high_bit,
             piece.width * place.high_bits, bytes);
}

// Decides whether all planes of a chunk are read as one range of bytes
// (ChunkBytes::together) or each plane by itself. One range is chosen if it has
// at most kMostBytes and no more pieces of kPieceBytes than separate ranges.
void ReadTogether(ChunkBytes* bytes) {
  constexpr int64_t kPieceBytes = 32;
  constexpr int64_t kMostBytes = kChunkChannels;
  const auto pieces = [](int64_t count) {
    return (count + kPieceBytes - 1) / kPieceBytes;
  };
  int64_t begin = std::numeric_limits<int64_t>::max();
  int64_t end = 0;
  int64_t apart = 0;
  for (int plane = 0; plane < 4; ++plane) {
    const int64_t count = bytes->end[plane] - bytes->begin[plane];
    if (count == 0) continue;
    apart += pieces(count);
    begin = std::min(begin, bytes->begin[plane]);
    end = std::max(end, bytes->end[plane]);
  }
  if (end - begin > kMostBytes || pieces(end - begin) > apart) return;
  std::fill_n(bytes->begin, 4, begin);
  std::fill_n(bytes->end, 4, end);
  bytes->together = true;
}

// Returns a number of words that suffices for the digits of a row's query in
// any group. Does not read the runs, because Fits may be called before they
// are known.
int64_t MostDigitWords(const LatentPartArgs& part) {
  int64_t most = 0;
  for (int64_t g = 0; g < part.num_groups; ++g) {
    const LatentGroup& group = part.groups[g];
    const int64_t pieces = group.num_runs + group.width / kDigitChannels;
    most = std::max(most, group.width / 2 + pieces * kMostPieceWords);
  }
  return most;
}

// Allocates consecutive pieces of scratch, each rounded up to whole cache
// lines.
class Divider {
 public:
  int64_t Take(int64_t floats) {
    const int64_t at = next_;
    next_ += PadLine(floats);
    return at;
  }
  int64_t taken() const { return next_; }

 private:
  int64_t next_ = 0;
};

}  // namespace

AttentionGrid::AttentionGrid(const PagedAttentionArgs& params, int threads)
    : params_(params),
      num_stored_keys_(params.num_key_parts),
      num_stored_values_(params.num_value_parts),
      heads_per_kv_(params.num_heads / params.num_kv_heads),
      threads_(threads) {
  AddExactParts();
  DescribeParts();
  DivideScratch();
  chunk_begin_.push_back(0);
  span_begin_.push_back(0);
  // Fits (ops.h) only asks whether one row fits into the scratch, so it passes
  // no lists of heads.
  if (!fits() || params_.keys[0].group_of_head == nullptr) return;
  for (int64_t p = 0; p < params_.num_key_parts; ++p) {
    AddChunks(params_.keys[p].latents);
  }
  for (int64_t p = 0; p < params_.num_value_parts; ++p) {
    AddChunks(params_.values[p].latents);
  }
  if (params_.key_bias != nullptr) {
    key_bias_turns_ = KeyBiasTurns(*params_.key_bias, params_.num_kv_heads);
  }
  const std::vector<std::vector<int64_t>> clusters = FindClusters();
  num_head_slices_ = slices_.size() - num_cluster_slices_;
  PlanMass(clusters);
  work_ = WorkOn(params_.sequences, params_.num_sequences);
}

void AttentionGrid::Bind(const Rows& rows) {
  params_.q = rows.q;
  params_.out = rows.out;
  params_.sequences = rows.sequences.data;
  params_.num_sequences = rows.sequences.count;
  work_ = rows.sequences.work;
  mass_memory_ = rows.mass;
}

int64_t AttentionGrid::WorkOn(const AttentionSequence* sequences,
                              int64_t count) const {
  int64_t work = 0;
  for (int64_t i = 0; i < count; ++i) work += WorkOf(sequences[i]);
  return work;
}

bool AttentionGrid::DividesAs(const AttentionGrid& other) const {
  const auto same_slices = [](const HeadSlice& a, const HeadSlice& b) {
    return a.num_heads == b.num_heads;
  };
  // Later slices are only used to add attention mass, so they do not affect how
  // a step is divided.
  const auto end = [](const AttentionGrid& grid) {
    return grid.slices_.begin() +
           static_cast<std::ptrdiff_t>(grid.num_cluster_slices_ +
                                       grid.num_head_slices_);
  };
  const auto same_sets = [](const ClusterSets& a, const ClusterSets& b) {
    return a.size == b.size && a.first_slice == b.first_slice &&
           a.num_slices == b.num_slices;
  };
  return threads_ == other.threads_ && heads_per_kv_ == other.heads_per_kv_ &&
         params_.page_tokens == other.params_.page_tokens &&
         params_.causal == other.params_.causal &&
         params_.window == other.params_.window &&
         max_rows_ == other.max_rows_ && max_panels_ == other.max_panels_ &&
         makes_tiles() == other.makes_tiles() &&
         num_cluster_slices_ == other.num_cluster_slices_ &&
         num_clusters_ == other.num_clusters_ &&
         widest_cluster_ == other.widest_cluster_ &&
         std::equal(slices_.begin(), end(*this), other.slices_.begin(),
                    end(other), same_slices) &&
         std::equal(sets_.begin(), sets_.end(), other.sets_.begin(),
                    other.sets_.end(), same_sets);
}

void AttentionGrid::AddExactParts() {
  // Copies the parts of the cache to `all` and appends the parts of their exact
  // rows.
  const auto extend = [](const auto* parts, int64_t count, auto* all) {
    all->assign(parts, parts + count);
    for (int64_t p = 0; p < count; ++p) {
      all->push_back(parts[p]);
      all->back().latents = parts[p].exact->ring;
    }
  };
  const auto remember = [this](const auto& all, const ExactSlots& slots) {
    for (size_t p = all.size() / 2; p < all.size(); ++p) {
      exact_.push_back({&all[p].latents, &all[p].exact->fresh, &slots});
    }
  };
  if (params_.key_exact.any()) {
    extend(params_.keys, num_stored_keys_, &key_parts_);
    params_.keys = key_parts_.data();
    params_.num_key_parts = 2 * num_stored_keys_;
    remember(key_parts_, params_.key_exact);
  }
  if (params_.value_exact.any()) {
    extend(params_.values, num_stored_values_, &value_parts_);
    params_.values = value_parts_.data();
    params_.num_value_parts = 2 * num_stored_values_;
    remember(value_parts_, params_.value_exact);
  }
}

void AttentionGrid::AddChunks(const LatentPartArgs& part) {
  for (int64_t g = 0; g < part.num_groups; ++g) {
    const LatentGroup& group = part.groups[g];
    LatentChunk chunk;
    const auto close = [&] {
      if (chunk.width > 0) {
        if (chunk.num_pieces > 0) PlacePieces(&chunk);
        chunks_.push_back(chunk);
      }
      chunk = {chunk.begin + chunk.width, 0,
               static_cast<int64_t>(pieces_.size()), 0, ChunkBytes()};
    };
    close();
    if (group.num_runs == 0) {
      while (chunk.begin < group.width) {
        chunk.width = std::min(kChunkChannels, group.width - chunk.begin);
        close();
      }
    }
    CodeCursor cursor(group);
    int64_t digits = 0;
    for (int64_t r = 0; r < group.num_runs; ++r) {
      const CodeRun& run = group.runs[r];
      // Only the last run may have 0 bits, and nothing is stored for it.
      if (run.bits == 0) break;
      const CodePlace place = cursor.Next(run);
      for (int64_t first = 0; first < run.width;) {
        const int64_t width = std::min(kDigitChannels, run.width - first);
        if (chunk.width + width > kChunkChannels ||
            chunk.num_pieces == kChunkPieces) {
          close();
        }
        CodePiece piece;
        piece.run = r;
        piece.begin = run.begin + first;
        piece.width = width;
        piece.place = place;
        piece.place.Skip(first);
        piece.starts_run = first == 0;
        first += piece.width;
        piece.ends_run = first == run.width;
        piece.digits = digits;
        digits += DigitWords(piece);
        Cover(piece, &chunk.bytes);
        pieces_.push_back(piece);
        chunk.width += piece.width;
        ++chunk.num_pieces;
      }
    }
    close();
    chunk_begin_.push_back(chunks_.size());
  }
}

void AttentionGrid::PlacePieces(LatentChunk* chunk) {
  ReadTogether(&chunk->bytes);
  for (int64_t i = 0; i < chunk->num_pieces; ++i) {
    CodePiece& piece = pieces_[static_cast<size_t>(chunk->first_piece + i)];
    CodePlace& place = piece.in_chunk;
    place = piece.place;
    place.low_bit -= 8 * chunk->bytes.begin[PlaneIndex(place.low_bits)];
    if (place.high_bits > 0) {
      place.high_bit -= 8 * chunk->bytes.begin[PlaneIndex(place.high_bits)];
    }
  }
}

// Returns the integers of the part's levels, or null if it has no levels.
const int8_t* AttentionGrid::AddLevels(const LatentPartArgs& part,
                                       float* step) {
  if (part.num_levels == 0) return nullptr;
  levels_.push_back(LevelIntegersOf(part));
  *step = levels_.back().step;
  return levels_.back().integers;
}

void AttentionGrid::DescribeParts() {
  levels_.reserve(
      static_cast<size_t>(params_.num_key_parts + params_.num_value_parts));
  for (int64_t p = 0; p < params_.num_key_parts; ++p) DescribeKey(p);
  for (int64_t p = 0; p < params_.num_value_parts; ++p) DescribeValue(p);
}

void AttentionGrid::DescribeKey(int64_t index) {
  const AttentionKeyPartArgs& from = params_.keys[index];
  KeyPart part;
  part.codes = MostRuns(from.latents) > 0;
  part.fixed_ranges = from.latents.static_scale != nullptr;
  part.first_group = num_groups_;
  num_groups_ += from.latents.num_groups;
  if (from.rebuild == nullptr) {
    part.width = WidestGroup(from.latents);
    if (part.codes) {
      part.multiplies_codes = true;
      part.levels = AddLevels(from.latents, &part.level_step);
      part.num_sums = part.fixed_ranges ? 1 : MostRuns(from.latents);
    }
    scores_codes_ = scores_codes_ || (part.codes && !part.fixed_ranges);
  } else {
    rebuilds_ = true;
    part.width = from.rebuild->dims;
    if (part.codes && from.rebuild->up != nullptr) {
      part.lift_runs = part.fixed_ranges ? 1 : MostRuns(from.latents);
      const int64_t sums =
          params_.num_kv_heads * from.rebuild->dims * part.lift_runs;
      if (held_lift_sums_ + sums <= kHeldLiftSums) {
        part.lift_offset = held_lift_sums_;
        held_lift_sums_ += sums;
      }
    }
  }
  const int64_t words =
      part.multiplies_codes ? MostDigitWords(from.latents) : part.width;
  part.holds = words <= kHeldQueryWidth;
  part.held_width = part.holds              ? words
                    : part.multiplies_codes ? kMostChunkDigits
                                            : kChunkChannels;
  if (index >= num_stored_keys_) {
    // A part of exact rows uses the same copy of the queries in scratch as its
    // stored part, unless that copy has digits.
    const KeyPart& stored = key(index - num_stored_keys_);
    part.shares_queries = !stored.multiplies_codes;
  }
  codes_ = codes_ || part.codes;
  keys_.push_back(part);
}

void AttentionGrid::DescribeValue(int64_t index) {
  const LatentPartArgs& from = params_.values[index].latents;
  const ValueLiftArgs* lift = params_.values[index].lift;
  ValuePart part;
  part.codes = MostRuns(from) > 0;
  part.lifted = lift != nullptr;
  lifts_ = lifts_ || part.lifted;
  part.fixed_ranges = from.static_scale != nullptr;
  part.first_group = num_groups_;
  num_groups_ += from.num_groups;
  part.sums_weights = !part.lifted && part.codes && part.fixed_ranges &&
                      params_.value_exact.any();
  const ValuePart* stored =
      index < num_stored_values_ ? nullptr : &value(index - num_stored_values_);
  if (stored != nullptr && !stored->sums_weights) {
    // Exact rows are added to the sums of their stored part.
    part.out_offset = stored->out_offset;
  } else {
    part.out_offset = out_width_;
    out_width_ += PadTile(part.lifted ? lift->dims : WidestGroup(from));
  }
  part.minima_offset = minima_width_;
  if (part.sums_weights) {
    minima_width_ += PadLine(1);
  } else if (!part.fixed_ranges && !part.lifted) {
    minima_width_ += PadLine(MostRuns(from));
  }
  if (part.codes && !part.lifted) {
    sums_codes_ = true;
    part.levels = AddLevels(from, &part.level_step);
  }
  codes_ = codes_ || part.codes;
  values_.push_back(part);
}

// Sets where the tiles of rebuilt keys and lifted values are in scratch. If
// `own`, each part has its own tile. Otherwise all key parts share one tile,
// and all value parts share another.
void AttentionGrid::PlaceTiles(bool own) {
  own_tiles_ = own;
  key_tiles_ = 0;
  value_tiles_ = 0;
  const auto place = [own](int64_t floats, int64_t* offset, int64_t* all) {
    *offset = own ? *all : 0;
    *all = std::max(*all, *offset + PadLine(floats));
  };
  for (size_t p = 0; p < keys_.size(); ++p) {
    const KeyRebuildArgs* rebuild = params_.keys[p].rebuild;
    if (rebuild == nullptr) continue;
    place(rebuild->dims * kAttentionBlockSlots, &keys_[p].tile_offset,
          &key_tiles_);
  }
  for (size_t p = 0; p < values_.size(); ++p) {
    if (!values_[p].lifted) continue;
    values_[p].tile_stride = PadTile(params_.values[p].lift->dims);
    place(values_[p].tile_stride * kAttentionBlockSlots,
          &values_[p].tile_offset, &value_tiles_);
  }
}

AttentionScratch AttentionGrid::Divide(int64_t rows) const {
  const int64_t block = kAttentionBlockSlots;
  int64_t raw = 0;
  int64_t pairs = 0;
  int64_t row_sums = 0;
  int64_t column_sums = 0;
  for (size_t p = 0; p < keys_.size(); ++p) {
    const KeyPart& part = keys_[p];
    const KeyRebuildArgs* rebuild = params_.keys[p].rebuild;
    if (rebuild == nullptr) continue;
    pairs = std::max(pairs, holds_angles_ ? rebuild->num_pairs : 1);
    if (part.lift_runs == 0) continue;
    raw = std::max(raw, rebuild->dims * block);
    if (part.lift_offset < 0) row_sums = std::max(row_sums, rebuild->dims);
  }
  for (const ValuePart& part : values_) {
    if (!part.lifted || !part.codes) continue;
    raw = std::max(raw, part.tile_stride * block);
    column_sums = std::max(column_sums, part.tile_stride);
  }
  Divider divider;
  AttentionScratch scratch;
  scratch.tile = divider.Take(kChunkChannels * block);
  scratch.scales = divider.Take(codes_ ? kChunkPieces * block : 0);
  scratch.minima = divider.Take(codes_ ? kChunkPieces * block : 0);
  scratch.keys = divider.Take(key_tiles_);
  scratch.values = divider.Take(value_tiles_);
  scratch.lift_raw = divider.Take(raw);
  scratch.cosines = divider.Take(pairs * block);
  scratch.sines = divider.Take(pairs * block);
  scratch.lift_sums = divider.Take(held_lift_sums_ + row_sums);
  scratch.column_sums = divider.Take(column_sums);
  scratch.scores = divider.Take(rows * block);
  scratch.scores_part = divider.Take(keys_.size() > 1 ? rows * block : 0);
  scratch.weight_digits =
      divider.Take(sums_codes_ ? rows * kWeightDigitsFloats : 0);
  scratch.scores_exact =
      divider.Take(params_.key_exact.any() ? rows * block : 0);
  scratch.raw = divider.Take(scores_codes_ ? rows * block : 0);
  scratch.states = divider.taken();
  scratch.floats = divider.taken();
  return scratch;
}

PanelState AttentionGrid::DivideState(int64_t rows) const {
  int64_t queries = 0;
  int64_t query_sums = 0;
  for (const KeyPart& part : keys_) {
    queries += part.shares_queries ? 0 : rows * part.held_width;
    query_sums += rows * part.num_sums;
  }
  Divider divider;
  PanelState state;
  state.q = divider.Take(queries);
  state.out = divider.Take(rows * out_width_);
  state.out_minima = divider.Take(rows * minima_width_);
  state.query_sums = divider.Take(query_sums);
  state.key_bias = divider.Take(rows * key_bias_columns());
  state.max = divider.Take(rows);
  state.sum = divider.Take(rows);
  state.total_max = divider.Take(rows);
  state.total_sum = divider.Take(rows);
  state.floats = divider.taken();
  return state;
}

bool AttentionGrid::Fits(int64_t rows) const {
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  const int64_t scratch_bytes = Divide(rows).floats * kFloat;
  const int64_t state_bytes = DivideState(rows).floats * kFloat;
  return makes_tiles() ? scratch_bytes <= kAttentionScratchBytes &&
                             state_bytes <= kRowStateBytes
                       : scratch_bytes + state_bytes <= kAttentionScratchBytes;
}

int64_t AttentionGrid::MostRows() const {
  int64_t fit = 0;
  int64_t beyond = (makes_tiles() ? kAttentionMaxRows : kAbsorbedRows) + 1;
  while (fit + 1 < beyond) {
    const int64_t rows = (fit + beyond) / 2;
    (Fits(rows) ? fit : beyond) = rows;
  }
  return fit;
}

// Chooses how many rows a panel has. If too few fit into scratch, gives up the
// separate tiles of parts or the stored rotation angles. Decoding profits more
// from the angles, so separate tiles are given up first. With lifted values,
// which only prompts have, the angles are given up first.
void AttentionGrid::ChooseRows() {
  PlaceTiles(true);
  max_rows_ = MostRows();
  if (max_rows_ >= kLeastPanelRows || !makes_tiles()) return;
  if (lifts_) {
    holds_angles_ = false;
    max_rows_ = MostRows();
    if (max_rows_ >= kLeastPanelRows) return;
    holds_angles_ = true;
  }
  PlaceTiles(false);
  max_rows_ = MostRows();
  if (max_rows_ >= kRowsWithAngles) return;
  holds_angles_ = false;
  max_rows_ = MostRows();
}

void AttentionGrid::DivideScratch() {
  ChooseRows();
  scratch_ = Divide(max_rows_);
  state_ = DivideState(max_rows_);
  if (makes_tiles() && own_tiles_ && fits()) {
    constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
    max_panels_ =
        std::clamp<int64_t>(kRowStateBytes / (state_.floats * kFloat), 1,
                            (kMostUnitRows + max_rows_ - 1) / max_rows_);
  }
  scratch_.floats += max_panels_ * state_.floats;
  int64_t queries = 0;
  int64_t sums = 0;
  for (size_t p = 0; p < keys_.size(); ++p) {
    KeyPart& part = keys_[p];
    part.sums_offset = sums;
    sums += max_rows_ * part.num_sums;
    if (part.shares_queries) {
      part.q_offset = keys_[p - static_cast<size_t>(num_stored_keys_)].q_offset;
      continue;
    }
    part.q_offset = queries;
    queries += max_rows_ * part.held_width;
  }
}

// Returns whether keys are rotated by angles that are the same for all heads
// and are held in scratch.
bool AttentionGrid::SharesAngles() const {
  bool shares = false;
  for (int64_t p = 0; p < params_.num_key_parts; ++p) {
    const KeyRebuildArgs* rebuild = params_.keys[p].rebuild;
    if (rebuild == nullptr || rebuild->num_pairs == 0) continue;
    if (rebuild->head_steps_stride != 0) return false;
    shares = true;
  }
  return shares && holds_angles_;
}

// Finds the clusters. Two KV heads are in the same cluster if they share a
// group in some part or share rotation angles, directly or through other heads.
std::vector<std::vector<int64_t>> AttentionGrid::FindClusters() {
  const auto heads = static_cast<size_t>(params_.num_kv_heads);
  std::vector<size_t> root(heads);
  for (size_t j = 0; j < heads; ++j) root[j] = j;
  std::vector<size_t> first;
  const auto join = [&](const int32_t* group_of_head, int64_t num_groups) {
    first.assign(static_cast<size_t>(num_groups), heads);
    for (size_t j = 0; j < heads; ++j) {
      size_t& other = first[static_cast<size_t>(group_of_head[j])];
      if (other == heads) {
        other = j;
      } else if (root[other] != root[j]) {
        const size_t from = std::max(root[j], root[other]);
        const size_t to = std::min(root[j], root[other]);
        std::replace(root.begin(), root.end(), from, to);
      }
    }
  };
  for (int64_t p = 0; p < params_.num_key_parts; ++p) {
    join(params_.keys[p].group_of_head, params_.keys[p].latents.num_groups);
  }
  for (int64_t p = 0; p < params_.num_value_parts; ++p) {
    join(params_.values[p].group_of_head, params_.values[p].latents.num_groups);
  }
  if (SharesAngles()) {
    for (size_t j = 1; j < heads; ++j) {
      const size_t first_of_set = j / kHeadsPerAngles * kHeadsPerAngles;
      if (root[j] != j || first_of_set == j) continue;
      std::replace(root.begin(), root.end(), j, root[first_of_set]);
    }
  }
  const int32_t* order = params_.keys[0].group_of_head;
  std::vector<std::vector<int64_t>> clusters;
  for (size_t r = 0; r < heads; ++r) {
    if (root[r] != r) continue;
    std::vector<int64_t>& cluster = clusters.emplace_back();
    for (size_t j = r; j < heads; ++j) {
      if (root[j] == r) cluster.push_back(static_cast<int64_t>(j));
    }
    std::stable_sort(cluster.begin(), cluster.end(),
                     [&](int64_t a, int64_t b) { return order[a] < order[b]; });
    widest_cluster_ = std::max(
        widest_cluster_, static_cast<int64_t>(cluster.size()) * heads_per_kv_);
    AddSlices(cluster);
  }
  num_clusters_ = static_cast<int64_t>(clusters.size());
  num_cluster_slices_ = slices_.size();
  if (!makes_tiles()) {
    AddSets(clusters);
    return clusters;
  }
  for (int64_t j = 0; j < params_.num_kv_heads; ++j) AddSlices({j});
  return clusters;
}

// Adds slices that have the heads of several neighbouring clusters (a set).
// With few rows, reading latents takes longer than computing. Memory is read
// faster in long runs: runs of 64 KiB take 0.8 of the time of runs of 16 KiB
// (measured). In a page, the latents of neighbouring groups are adjacent. If a
// page does not have whole blocks, these latents are not adjacent for each
// block. Then there are no sets.
void AttentionGrid::AddSets(const std::vector<std::vector<int64_t>>& clusters) {
  if (params_.page_tokens % kAttentionBlockSlots != 0) return;
  const int64_t count = num_clusters_;
  std::vector<int64_t> set;
  // Adds sets of each size that ClustersTogether may return.
  for (int64_t size = 2; size / 2 < count; size *= 2) {
    const size_t first_slice = slices_.size();
    const int64_t num_sets = (count + size - 1) / size;
    for (int64_t s = 0; s < num_sets; ++s) {
      set.clear();
      const int64_t end = count * (s + 1) / num_sets;
      for (int64_t c = count * s / num_sets; c < end; ++c) {
        const std::vector<int64_t>& cluster = clusters[static_cast<size_t>(c)];
        set.insert(set.end(), cluster.begin(), cluster.end());
      }
      AddSlices(set);
    }
    sets_.push_back({size, first_slice,
                     static_cast<int64_t>(slices_.size() - first_slice)});
  }
}

// Returns the number of the sequence's rows times the number of slots that at
// least one of them sees.
int64_t AttentionGrid::WorkOf(const AttentionSequence& sequence) const {
  const AttentionUnit rows = {&sequence, nullptr, 0, sequence.num_rows};
  const VisibleRange slots = UnitSlots(params_, rows);
  return std::max<int64_t>(slots.end - slots.begin, 0) * sequence.num_rows;
}

// Returns how many clusters should be in a set for this sequence. The result is
// a power of two, so that sequences of similar length use the same sets. If it
// is at least num_clusters_, one set has all clusters.
int64_t AttentionGrid::ClustersTogether(const AttentionSequence& sequence,
                                        int64_t work_of_all) const {
  const int64_t work = WorkOf(sequence);
  const int64_t rows = widest_cluster_ * sequence.num_rows;
  if (work == 0 || rows == 0) return 0;
  const int64_t most =
      std::min(max_rows_ / rows, work_of_all / (threads_ * kUnitsPerThread) *
                                     num_clusters_ / work);
  int64_t size = 1;
  while (size < num_clusters_ && std::min(2 * size, num_clusters_) <= most) {
    size *= 2;
  }
  return size;
}

void AttentionGrid::AddSlices(const std::vector<int64_t>& kv_heads) {
  const auto begin = static_cast<int64_t>(heads_.size());
  for (const int64_t j : kv_heads) {
    for (int64_t h = 0; h < heads_per_kv_; ++h) {
      heads_.push_back(j * heads_per_kv_ + h);
    }
  }
  const int64_t count = static_cast<int64_t>(heads_.size()) - begin;
  const int64_t pieces = (count + max_rows_ - 1) / max_rows_;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t first = count * i / pieces;
    AddSlice(begin + first, count * (i + 1) / pieces - first);
  }
}

void AttentionGrid::AddSlice(int64_t first, int64_t count) {
  HeadSlice slice = {first, count, static_cast<int64_t>(span_begin_.size()) - 1,
                     true};
  const int64_t num_parts = params_.num_key_parts + params_.num_value_parts;
  for (int64_t p = 0; p < num_parts; ++p) {
    const bool is_key = p < params_.num_key_parts;
    const int64_t v = p - params_.num_key_parts;
    const int32_t* group_of_head = is_key ? params_.keys[p].group_of_head
                                          : params_.values[v].group_of_head;
    const bool by_head = is_key ? params_.keys[p].rebuild != nullptr
                                : params_.values[v].lift != nullptr;
    const auto begin = static_cast<std::ptrdiff_t>(spans_.size());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t kv_head =
          heads_[static_cast<size_t>(first + i)] / heads_per_kv_;
      const int64_t group = group_of_head[kv_head];
      HeadSpan* last = i > 0 ? &spans_.back() : nullptr;
      if (last != nullptr && last->group == group &&
          (!by_head || last->kv_head == kv_head)) {
        last->end = i + 1;
      } else {
        spans_.push_back({group, kv_head, i, i + 1});
      }
    }
    slice.one_span_each =
        slice.one_span_each &&
        static_cast<std::ptrdiff_t>(spans_.size()) == begin + 1;
    std::stable_sort(
        spans_.begin() + begin, spans_.end(),
        [](const HeadSpan& a, const HeadSpan& b) { return a.group < b.group; });
    span_begin_.push_back(spans_.size());
  }
  slices_.push_back(slice);
}

AttentionGrid::Cut AttentionGrid::CutOf(const AttentionSequence& sequence,
                                        int64_t work) const {
  if (!sets_.empty()) {
    const int64_t size = ClustersTogether(sequence, work);
    for (const ClusterSets& sets : sets_) {
      if (sets.size != size) continue;
      return {slices_.data() + sets.first_slice, sets.num_slices, 1};
    }
  }
  // With many rows, units of one KV head cost least, because then all rows of a
  // unit use each rebuilt key.
  const bool by_head =
      makes_tiles() && sequence.num_rows * widest_cluster_ > max_rows_;
  Cut cut;
  cut.slices = slices_.data() + (by_head ? num_cluster_slices_ : 0);
  cut.num_slices =
      static_cast<int64_t>(by_head ? num_head_slices_ : num_cluster_slices_);
  const int64_t heads =
      std::min(max_rows_, by_head ? heads_per_kv_ : widest_cluster_);
  const int64_t queries = max_rows_ / heads;
  const int64_t panels = (sequence.num_rows + queries - 1) / queries;
  cut.num_tiles = by_head ? SharesOf(panels, cut.num_slices) : panels;
  return cut;
}

// Returns into how many units the panels of a slice are divided. It is the
// least number for which no unit has more than max_panels_ panels and threads
// are idle for at most 1 / kIdleShare of the time.
int64_t AttentionGrid::SharesOf(int64_t panels, int64_t num_slices) const {
  int64_t shares = (panels + max_panels_ - 1) / max_panels_;
  for (; shares < panels; ++shares) {
    const int64_t units = shares * num_slices;
    const int64_t rounds = (units + threads_ - 1) / threads_;
    if (rounds * threads_ - units <= units / kIdleShare) break;
  }
  return shares;
}

int64_t AttentionGrid::PanelsOf(const AttentionUnit& unit) const {
  const int64_t queries = max_rows_ / unit.slice->num_heads;
  return (unit.num_queries + queries - 1) / queries;
}

AttentionUnit AttentionGrid::PanelOf(const AttentionUnit& unit,
                                     int64_t panel) const {
  const int64_t panels = PanelsOf(unit);
  const int64_t begin = unit.num_queries * panel / panels;
  const int64_t end = unit.num_queries * (panel + 1) / panels;
  return {unit.sequence, unit.slice, unit.query_begin + begin, end - begin};
}

bool UnitCursor::MoveTo(int64_t index, AttentionUnit* unit) {
  for (; sequence_ < sequences_.count; ++sequence_) {
    const AttentionSequence& sequence = sequences_.data[sequence_];
    const AttentionGrid::Cut cut = grid_.CutOf(sequence, sequences_.work);
    const int64_t here = index - first_;
    if (here < cut.units()) {
      const int64_t tile = here / cut.num_slices;
      const int64_t begin = sequence.num_rows * tile / cut.num_tiles;
      const int64_t end = sequence.num_rows * (tile + 1) / cut.num_tiles;
      *unit = {&sequence, cut.slices + here % cut.num_slices, begin,
               end - begin};
      return true;
    }
    first_ += cut.units();
  }
  return false;
}

bool TakesSplits(const AttentionGrid& grid,
                 const AttentionGrid::Sequences& sequences) {
  bool any_long = false;
  UnitCursor cursor(grid, sequences);
  AttentionUnit unit;
  for (int64_t i = 0; cursor.MoveTo(i, &unit); ++i) {
    const VisibleRange slots = UnitSlots(grid.params(), unit);
    if (grid.PanelsOf(unit) > 1) return false;
    if (i + 1 >= grid.threads() || slots.begin >= slots.end) return false;
    any_long = any_long || slots.end - slots.begin > kAttentionSplitSlots;
  }
  return any_long;
}

}  // namespace kvasir::kernels
