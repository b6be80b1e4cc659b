#include "worker/program/attention_program.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

#include "base/status_macros.h"

namespace kvasir::worker {
namespace {

std::atomic<int64_t> num_attention_programs = 0;

using plan::ResolvedLatent;
using plan::ResolvedPart;
using plan::RopePairing;
using plan::RopeSide;
using plan::Space;

using Indices = std::vector<int64_t>;
using Pairs = std::vector<uint32_t>;

Indices Iota(int64_t count) {
  Indices values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), int64_t{0});
  return values;
}

Pairs FirstPairs(int64_t count) {
  Pairs pairs(static_cast<size_t>(count));
  std::iota(pairs.begin(), pairs.end(), 0u);
  return pairs;
}

// Adds one row to `takes`: to the last RowTake if row and column continue it,
// else as a new RowTake.
void Take(int64_t row, int64_t column, std::vector<RowTake>* takes) {
  if (!takes->empty()) {
    RowTake& last = takes->back();
    if (row == last.row + last.count && column == last.column + last.count) {
      ++last.count;
      return;
    }
  }
  takes->push_back({row, 1, column});
}

void TakeRun(int64_t row, int64_t count, int64_t column,
             std::vector<RowTake>* takes) {
  for (int64_t i = 0; i < count; ++i) Take(row + i, column + i, takes);
}

// How RoPE rotates the first dimensions of a head.
struct HeadTurn {
  Pairs pairs;
  RopePairing pairing = RopePairing::kHalfSplit;
};

// Adds the rotation of one head at `column`. If the last rotation has heads of
// the same kind and ends at `column`, adds the head to it.
void Turn(int64_t column, int64_t head_dim, const HeadTurn& turn,
          std::vector<Rotation>* rotations) {
  if (turn.pairs.empty()) return;
  const auto num_pairs = static_cast<int64_t>(turn.pairs.size());
  if (!rotations->empty()) {
    Rotation& last = rotations->back();
    if (last.head_dim == head_dim && last.num_pairs == num_pairs &&
        last.pairing == turn.pairing &&
        column == last.column + last.num_heads * head_dim) {
      last.pairs.insert(last.pairs.end(), turn.pairs.begin(), turn.pairs.end());
      ++last.num_heads;
      return;
    }
  }
  rotations->push_back(
      {column, 1, head_dim, turn.pairing, num_pairs, turn.pairs});
}

// If all heads rotate by the same pairs, keeps only the first head's list
// of pairs.
void ShareTable(Rotation* rotation) {
  const auto n = static_cast<std::ptrdiff_t>(rotation->num_pairs);
  auto& pairs = rotation->pairs;
  for (auto at = pairs.begin(); at != pairs.end(); at += n) {
    if (!std::equal(pairs.begin(), pairs.begin() + n, at)) return;
  }
  pairs.resize(static_cast<size_t>(n));
}

void ShareTables(std::vector<Rotation>* rotations) {
  for (Rotation& rotation : *rotations) ShareTable(&rotation);
}

// Whether a low-rank matrix (".down") makes the latents, instead of the model's
// own projection.
bool IsLowRank(const ResolvedPart& part) {
  return part.space == Space::kLowRank || part.space == Space::kRopeLowRank;
}

// The cache leaves a bias or mean out only if it stores full-rank keys, one for
// each KV head, as codes with a scale for each token. Static ranges do not
// qualify, because they were measured on keys that include bias and mean.
KeyBias KeyBiasOf(const plan::ResolvedAttention& attention,
                  const plan::AttentionShape& shape) {
  if (shape.qk_norm || attention.key.parts.size() != 1) {
    return KeyBias::kCached;
  }
  const ResolvedPart& key = attention.key.parts[0];
  const bool codes_of_token = key.range == plan::RangeKind::kToken ||
                              key.range == plan::RangeKind::kTokenNorm;
  if (key.joint || key.space != Space::kFull || key.has_basis() ||
      !codes_of_token) {
    return KeyBias::kCached;
  }
  return key.stored == RopeSide::kBefore ? KeyBias::kRebuilt : KeyBias::kScored;
}

class Maker {
 public:
  Maker(const plan::ResolvedAttention& attention,
        const plan::AttentionShape& shape, const RankHeads& heads,
        plan::AttentionTensors tensors)
      : attention_(attention), shape_(shape), tensors_(std::move(tensors)) {
    out_.heads = heads;
    out_.head_dim = shape.head_dim;
    out_.rotates = attention.rotates;
    out_.output_bias = tensors_.output_bias;
    out_.key_bias = KeyBiasOf(attention, shape);
  }

  AttentionProgram Make() {
    const std::vector<ResolvedPart>& keys = attention_.key.parts;
    for (const ResolvedPart& part : keys) out_.key.push_back(MakeKey(part));
    MakeQueries();
    for (size_t p = 0; p < keys.size(); ++p) Project(keys[p], &out_.key[p]);
    // Values do not rotate, so they have one part with all dims.
    const ResolvedPart& value = attention_.value.parts[0];
    static_cast<PartProgram&>(out_.value) = MakePart(value);
    out_.joint = value.joint;
    if (out_.joint) {
      ShareColumns(out_.key.back(), &out_.value);
    } else {
      Project(value, &out_.value);
    }
    out_.projection_columns = column_;
    for (KeyProgram& part : out_.key) PlaceLifted(&part);
    for (KeyProgram& part : out_.key) PlaceBasis(&part);
    PlaceBasis(&out_.value);
    out_.row_columns = column_;
    MakeOutput(value);
    for (const Projection& projection : out_.projections) {
      out_.has_bias = out_.has_bias || projection.has_bias;
    }
    out_.tensors = std::move(tensors_.tensors);
    return std::move(out_);
  }

 private:
  int64_t share() const { return shape_.num_heads / shape_.num_kv_heads; }
  // Returns the KV head that a query head of this rank reads, as its number in
  // the whole model.
  int64_t KvHeadOf(int64_t query_head) const {
    return (out_.heads.query.first + query_head) / share();
  }
  const LatentProgram& LatentOf(const PartProgram& part,
                                int64_t query_head) const {
    const int64_t local = KvHeadOf(query_head) - out_.heads.kv.first;
    return part.latents[static_cast<size_t>(
        part.group_of_head[static_cast<size_t>(local)])];
  }
  int64_t num_pairs() const { return out_.rotates ? shape_.rotary_dim / 2 : 0; }

  // Sets the members that key parts and value parts have in common.
  PartProgram MakePart(const ResolvedPart& from) const {
    PartProgram part;
    part.prefix = from.prefix;
    part.lift_prefix = from.lift_prefix;
    part.has_basis = from.transform == plan::Transform::kBasisStatic &&
                     from.space == Space::kFull;
    part.has_mean = part.has_basis && from.mean;
    part.hadamard = from.transform == plan::Transform::kHadamardOnline;
    part.static_ranges = from.range == plan::RangeKind::kChannel;
    part.group_of_head.assign(static_cast<size_t>(out_.heads.kv.count), -1);
    // the first channel of latent g, counted over all latents of the part
    int64_t channel = 0;
    for (size_t g = 0; g < from.latents.size(); ++g) {
      const ResolvedLatent& resolved = from.latents[g];
      LatentProgram latent;
      latent.index = static_cast<int64_t>(g);
      latent.width = resolved.channels;
      latent.stored = resolved.stored_channels();
      latent.column = part.latent_columns;
      for (size_t place = 0; place < resolved.heads.size(); ++place) {
        if (!out_.heads.kv.Contains(resolved.heads[place])) continue;
        const int64_t local = resolved.heads[place] - out_.heads.kv.first;
        latent.heads.push_back(local);
        latent.places.push_back(static_cast<int64_t>(place));
        part.group_of_head[static_cast<size_t>(local)] =
            static_cast<int32_t>(part.latents.size());
      }
      if (!latent.heads.empty()) {
        if (from.space == Space::kRopeLowRank) AddChannels(resolved, &latent);
        TakeRun(channel, latent.width, part.latent_columns, &part.range_takes);
        part.latent_columns += latent.width;
        part.latents.push_back(std::move(latent));
      }
      channel += resolved.channels;
    }
    return part;
  }

  static void AddChannels(const ResolvedLatent& from, LatentProgram* latent) {
    latent->pairs = from.pairs;
    for (const uint32_t pair : from.channel_pairs) {
      latent->channel_place.push_back(
          std::lower_bound(from.pairs.begin(), from.pairs.end(), pair) -
          from.pairs.begin());
    }
  }

  KeyProgram MakeKey(const ResolvedPart& from) const {
    KeyProgram part;
    static_cast<PartProgram&>(part) = MakePart(from);
    const bool unrotated = from.stored == RopeSide::kBefore;
    const bool low_rank = from.space == Space::kLowRank;
    // If keys do not rotate, either keys or queries can be lifted. With a
    // Hadamard transform, only queries can.
    const bool lifted_here = from.rebuilt && low_rank && !part.hadamard;
    if (unrotated || lifted_here) part.rebuild = MakeRebuild(from, part);
    if (part.rebuild.has_value() && part.rebuild->lifted) return part;
    if (IsLowRank(from)) {
      if (!from.folded) {
        part.lift = low_rank ? QueryLift::kMatrix : QueryLift::kComplex;
      }
    } else if (part.has_basis) {
      part.lift = QueryLift::kMatrix;
    }
    return part;
  }

  RebuildProgram MakeRebuild(const ResolvedPart& from,
                             const KeyProgram& part) const {
    const bool low_rank = from.space == Space::kLowRank;
    RebuildProgram rebuild;
    rebuild.lifted = low_rank || part.has_basis;
    rebuild.has_bias =
        part.has_mean || (low_rank && (shape_.qkv_bias || from.mean));
    rebuild.dims = from.space == Space::kRopeLowRank
                       ? part.latents[0].width
                       : from.latents[0].head_dims;
    std::vector<Rotation> turned;
    for (int64_t head = 0; head < out_.heads.kv.count; ++head) {
      Turn(head * rebuild.dims, rebuild.dims, TurnOfKey(from, part, head),
           &turned);
    }
    ShareTables(&turned);
    if (!turned.empty()) rebuild.rotation = std::move(turned[0]);
    return rebuild;
  }

  // The rotation pairs that the dims of a low_rank part contain, ascending.
  Pairs CoveredPairs(const ResolvedPart& part) const {
    Pairs pairs;
    const bool interleaved = shape_.pairing == RopePairing::kInterleaved;
    for (const int64_t dim : part.dims) {
      if (dim >= 2 * num_pairs()) continue;
      if (interleaved && dim % 2 == 0) {
        pairs.push_back(static_cast<uint32_t>(dim / 2));
      } else if (!interleaved && dim < num_pairs()) {
        pairs.push_back(static_cast<uint32_t>(dim));
      }
    }
    return pairs;
  }

  static const Pairs& KeptPairs(const ResolvedPart& part, int64_t kv_head) {
    return part.LatentOf(kv_head).pairs;
  }

  static Pairs ChannelPairs(const LatentProgram& latent) {
    Pairs pairs;
    for (const int64_t place : latent.channel_place) {
      pairs.push_back(latent.pairs[static_cast<size_t>(place)]);
    }
    return pairs;
  }

  // How RoPE rotates the key of KV head `local` of this rank. For
  // rope_low_rank, the channels of the head's latent represent the pairs to
  // rotate.
  HeadTurn TurnOfKey(const ResolvedPart& from, const PartProgram& part,
                     int64_t local) const {
    const auto head = static_cast<size_t>(local);
    switch (from.space) {
      case Space::kFull:
        return {FirstPairs(num_pairs()), shape_.pairing};
      case Space::kLowRank:
        return {CoveredPairs(from), shape_.pairing};
      case Space::kRopePairs:
        return {KeptPairs(from, out_.heads.kv.first + local), shape_.pairing};
      case Space::kRopeLowRank:
        break;
    }
    const auto group = static_cast<size_t>(part.group_of_head[head]);
    return {ChannelPairs(part.latents[group]), RopePairing::kHalfSplit};
  }

  // The dims of a query head that a part uses, for plans that fold no lift into
  // q_proj.
  Indices QueryDims(const ResolvedPart& from, const PartProgram& part,
                    int64_t query_head) const {
    const auto pair_dims = [this](const Pairs& pairs) {
      return plan::PairDims(shape_.pairing, shape_.rotary_dim, pairs);
    };
    switch (from.space) {
      case Space::kFull:
        return Iota(shape_.head_dim);
      case Space::kLowRank:
        return from.dims;
      case Space::kRopePairs:
        return pair_dims(KeptPairs(from, KvHeadOf(query_head)));
      case Space::kRopeLowRank:
        break;
    }
    Indices dims = pair_dims(LatentOf(part, query_head).pairs);
    std::sort(dims.begin(), dims.end());
    return dims;
  }

  // How RoPE rotates the columns of a query head that belong to a part.
  HeadTurn TurnOfQuery(const ResolvedPart& from, const KeyProgram& part,
                       int64_t query_head) const {
    if (from.space == Space::kRopeLowRank && part.lift == QueryLift::kComplex) {
      return {LatentOf(part, query_head).pairs, shape_.pairing};
    }
    // Queries with a folded lift have the form of latents. In a low_rank part
    // they do not rotate.
    if (from.space == Space::kLowRank && from.folded) return {};
    return TurnOfKey(from, part, KvHeadOf(query_head) - out_.heads.kv.first);
  }

  void MakeQueries() {
    Projection projection;
    projection.name = "self_attn.q_proj";
    projection.has_bias = shape_.qkv_bias;
    const std::vector<ResolvedPart>& parts = attention_.key.parts;
    const bool folded =
        std::any_of(parts.begin(), parts.end(),
                    [](const ResolvedPart& part) { return part.folded; });
    // The row of q_proj at which this rank's first head begins.
    int64_t first_row = 0;
    for (int64_t i = 0; i < out_.heads.query.first; ++i) {
      first_row += tensors_.query_rows[static_cast<size_t>(i)];
    }
    // For each head, the next row of q_proj to take. It advances as one part
    // after the other takes its rows.
    Indices head_row;
    for (int64_t h = 0; h < out_.heads.query.count; ++h) {
      head_row.push_back(first_row);
      first_row +=
          tensors_.query_rows[static_cast<size_t>(out_.heads.query.first + h)];
    }
    for (size_t p = 0; p < out_.key.size(); ++p) {
      const ResolvedPart& from = parts[p];
      KeyProgram& part = out_.key[p];
      for (int64_t h = 0; h < out_.heads.query.count; ++h) {
        int64_t& row = head_row[static_cast<size_t>(h)];
        const int64_t begin = column_;
        if (folded) {
          const ResolvedLatent& latent = from.LatentOf(KvHeadOf(h));
          const int64_t count =
              from.folded ? latent.channels : latent.head_dims;
          TakeRun(row, count, column_, &projection.takes);
          row += count;
          column_ += count;
        } else {
          for (const int64_t dim : QueryDims(from, part, h)) {
            Take(row + dim, column_++, &projection.takes);
          }
        }
        part.projected.column.push_back(begin);
        part.projected.width.push_back(column_ - begin);
        if (out_.rotates) {
          Turn(begin, column_ - begin, TurnOfQuery(from, part, h),
               &part.query_rotations);
        }
      }
      ShareTables(&part.query_rotations);
      part.query = part.projected;
    }
    out_.projections.push_back(std::move(projection));
  }

  // Adds the columns from which a part's latents are made, and their rotation.
  void Project(const ResolvedPart& from, PartProgram* part) {
    Projection projection;
    const bool down = IsLowRank(from);
    projection.name = from.prefix + (down ? ".down" : "");
    projection.has_bias = down ? from.latent_bias : shape_.qkv_bias;
    part->source_column = column_;
    if (part->has_basis) {
      part->source_columns = shape_.num_kv_heads * shape_.head_dim;
      TakeRun(0, part->source_columns, column_, &projection.takes);
    } else {
      part->source_columns = part->latent_columns;
      part->latent_column = column_;
      for (const RowTake& take : part->range_takes) {
        TakeRun(take.row, take.count, column_ + take.column, &projection.takes);
      }
    }
    column_ += part->source_columns;
    if (from.stored == RopeSide::kAfter && out_.rotates) {
      RotateSource(from, part);
    }
    if (!part->static_ranges) part->range_takes.clear();
    out_.projections.push_back(std::move(projection));
  }

  // Keys and values share the latents of a joint part. The key part makes them,
  // and the value part only takes over its columns.
  static void ShareColumns(const PartProgram& key, PartProgram* value) {
    value->latent_column = key.latent_column;
    value->source_column = key.source_column;
    value->source_columns = key.source_columns;
    value->range_takes = key.range_takes;
  }

  void RotateSource(const ResolvedPart& from, PartProgram* part) const {
    const int64_t first = part->source_column;
    if (part->has_basis) {
      for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
        Turn(first + head * shape_.head_dim, shape_.head_dim,
             {FirstPairs(num_pairs()), shape_.pairing}, &part->rotations);
      }
    } else {
      for (const LatentProgram& latent : part->latents) {
        Turn(first + latent.column, latent.width,
             TurnOfKey(from, *part, latent.heads[0]), &part->rotations);
      }
    }
    ShareTables(&part->rotations);
  }

  void PlaceLifted(KeyProgram* part) {
    if (part->lift == QueryLift::kNone) return;
    for (int64_t h = 0; h < out_.heads.query.count; ++h) {
      const int64_t width = LatentOf(*part, h).width;
      part->query.column[static_cast<size_t>(h)] = column_;
      part->query.width[static_cast<size_t>(h)] = width;
      column_ += width;
    }
  }

  void PlaceBasis(PartProgram* part) {
    if (!part->has_basis) return;
    part->latent_column = column_;
    column_ += part->latent_columns;
  }

  void MakeOutput(const ResolvedPart& from) {
    ValueProgram& value = out_.value;
    value.lifted =
        value.has_basis || (from.space == Space::kLowRank && !from.folded);
    for (int64_t h = 0; h < out_.heads.query.count; ++h) {
      const int64_t width = LatentOf(value, h).width;
      value.attended.column.push_back(value.attended_columns);
      value.attended.width.push_back(width);
      value.attended_columns += width;
    }
    for (int64_t i = 0; i < shape_.num_heads; ++i) {
      const int64_t own = tensors_.output_columns[static_cast<size_t>(i)];
      if (i < out_.heads.query.first) out_.output_first_column += own;
      if (out_.heads.query.Contains(i)) out_.output_columns += own;
      out_.output_all_columns += own;
    }
  }

  const plan::ResolvedAttention& attention_;
  const plan::AttentionShape& shape_;
  plan::AttentionTensors tensors_;
  AttentionProgram out_;
  int64_t column_ = 0;  // the next free column of a token's row
};

}  // namespace

absl::StatusOr<AttentionProgram> MakeAttentionProgram(
    const plan::ResolvedAttention& attention, const plan::AttentionShape& shape,
    int64_t layer, const RankHeads& heads) {
  KVASIR_ASSIGN_OR_RETURN(plan::AttentionTensors tensors,
                          plan::TensorsOf(attention, shape, layer));
  ++num_attention_programs;
  return Maker(attention, shape, heads, std::move(tensors)).Make();
}

int64_t NumAttentionPrograms() { return num_attention_programs; }

}  // namespace kvasir::worker
