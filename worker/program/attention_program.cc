#include "worker/program/attention_program.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/status_macros.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::Codec;
using kvasir::v1::Part;
using model::PartTensors;
using model::RopePairing;

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

// One more row, joined to the run before it where both follow on.
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

// How the first numbers of a head turn.
struct HeadTurn {
  Pairs pairs;
  RopePairing pairing = RopePairing::kHalfSplit;
};

// One more head at `column`: joined to the heads before it where all have as
// many numbers and pairs.
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

// One table where all heads turn alike.
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

class Maker {
 public:
  Maker(const model::DecoderSpec& spec, int64_t layer, const RankHeads& heads,
        const model::AttentionTensors& tensors)
      : spec_(spec), tensors_(tensors) {
    out_.heads = heads;
    out_.head_dim = spec.head_dim;
    out_.rotates = spec.rope.rotary_dim > 0 &&
                   spec.layers[static_cast<size_t>(layer)].rope;
    out_.output_bias = tensors.output_bias;
    out_.tensors = tensors.tensors;
  }

  AttentionProgram Make(const kvasir::v1::LayerPlan& plan) {
    for (int p = 0; p < plan.key().parts_size(); ++p) {
      out_.key.push_back(MakeKey(plan.key().parts(p), p));
    }
    MakeQueries(plan);
    for (int p = 0; p < plan.key().parts_size(); ++p) {
      Project(plan.key().parts(p), tensors_.key[static_cast<size_t>(p)],
              &out_.key[static_cast<size_t>(p)]);
    }
    // Values do not rotate: they have one part, of all dims.
    const Part& value = plan.value().parts(0);
    static_cast<PartProgram&>(out_.value) = MakePart(value, tensors_.value[0]);
    Project(value, tensors_.value[0], &out_.value);
    out_.projection_columns = column_;
    for (KeyProgram& part : out_.key) PlaceLifted(&part);
    for (KeyProgram& part : out_.key) PlaceBasis(&part);
    PlaceBasis(&out_.value);
    out_.row_columns = column_;
    MakeOutput(value);
    for (const Projection& projection : out_.projections) {
      out_.has_bias = out_.has_bias || projection.has_bias;
    }
    return std::move(out_);
  }

 private:
  int64_t share() const { return spec_.num_heads / spec_.num_kv_heads; }
  // The model's KV head of the rank's query head.
  int64_t KvHeadOf(int64_t query_head) const {
    return (out_.heads.query.first + query_head) / share();
  }
  const LatentProgram& LatentOf(const PartProgram& part,
                                int64_t query_head) const {
    const int64_t local = KvHeadOf(query_head) - out_.heads.kv.first;
    return part.latents[static_cast<size_t>(
        part.group_of_head[static_cast<size_t>(local)])];
  }
  int64_t num_pairs() const {
    return out_.rotates ? spec_.rope.rotary_dim / 2 : 0;
  }

  // The latents of either side.
  PartProgram MakePart(const Part& plan, const PartTensors& tensors) const {
    PartProgram part;
    part.prefix = tensors.prefix;
    const Codec& codec = plan.codec();
    part.has_basis = codec.has_basis_static() && plan.has_full();
    part.has_mean = part.has_basis && plan.mean();
    part.hadamard = codec.has_hadamard_online();
    part.static_ranges = codec.has_channel_static();
    part.group_of_head.assign(static_cast<size_t>(out_.heads.kv.count), -1);
    int64_t channel = 0;  // in the tensors of all latents
    for (size_t g = 0; g < tensors.latents.size(); ++g) {
      const model::LatentTensors& from = tensors.latents[g];
      LatentProgram latent;
      latent.index = static_cast<int64_t>(g);
      latent.width = from.channels;
      latent.column = part.latent_columns;
      for (size_t place = 0; place < from.heads.size(); ++place) {
        if (!out_.heads.kv.Contains(from.heads[place])) continue;
        const int64_t local = from.heads[place] - out_.heads.kv.first;
        latent.heads.push_back(local);
        latent.places.push_back(static_cast<int64_t>(place));
        part.group_of_head[static_cast<size_t>(local)] =
            static_cast<int32_t>(part.latents.size());
      }
      if (!latent.heads.empty()) {
        if (plan.has_rope_low_rank()) {
          AddChannels(plan.rope_low_rank().groups(static_cast<int>(g)),
                      &latent);
        }
        TakeRun(channel, latent.width, part.latent_columns, &part.range_takes);
        part.latent_columns += latent.width;
        part.latents.push_back(std::move(latent));
      }
      channel += from.channels;
    }
    return part;
  }

  static void AddChannels(const kvasir::v1::RopeLowRankSpace::Group& group,
                          LatentProgram* latent) {
    latent->pairs.assign(group.pairs().begin(), group.pairs().end());
    for (int i = 0; i < group.pairs_size(); ++i) {
      latent->channel_place.insert(latent->channel_place.end(),
                                   group.rank_per_pair(i), i);
    }
  }

  KeyProgram MakeKey(const Part& plan, int index) const {
    const PartTensors& tensors = tensors_.key[static_cast<size_t>(index)];
    KeyProgram part;
    static_cast<PartProgram&>(part) = MakePart(plan, tensors);
    const bool unrotated = plan.stored() == kvasir::v1::PRE_ROPE;
    // A lift of keys that do not rotate stands on either side of the product;
    // a Hadamard transform has to be taken back there.
    const bool lifted_here =
        tensors.rebuilt && plan.has_low_rank() && !part.hadamard;
    if (unrotated || lifted_here)
      part.rebuild = MakeRebuild(plan, tensors, part);
    if (part.rebuild.has_value() && part.rebuild->lifted) return part;
    if (plan.has_low_rank() || plan.has_rope_low_rank()) {
      if (!tensors.folded) {
        part.lift =
            plan.has_low_rank() ? QueryLift::kMatrix : QueryLift::kComplex;
      }
    } else if (part.has_basis) {
      part.lift = QueryLift::kMatrix;
    }
    return part;
  }

  RebuildProgram MakeRebuild(const Part& plan, const PartTensors& tensors,
                             const KeyProgram& part) const {
    RebuildProgram rebuild;
    rebuild.lifted = plan.has_low_rank() || part.has_basis;
    rebuild.has_bias = part.has_mean ||
                       (plan.has_low_rank() && (spec_.qkv_bias || plan.mean()));
    rebuild.dims = plan.has_rope_low_rank() ? part.latents[0].width
                                            : tensors.latents[0].head_dims;
    std::vector<Rotation> turned;
    for (int64_t head = 0; head < out_.heads.kv.count; ++head) {
      Turn(head * rebuild.dims, rebuild.dims,
           TurnOfKey(plan, tensors, part, head), &turned);
    }
    ShareTables(&turned);
    if (!turned.empty()) rebuild.rotation = std::move(turned[0]);
    return rebuild;
  }

  // Pairs among the dims of a low_rank part, ascending.
  Pairs CoveredPairs(const PartTensors& tensors) const {
    Pairs pairs;
    const bool interleaved = spec_.rope.pairing == RopePairing::kInterleaved;
    for (const int64_t dim : tensors.dims) {
      if (dim >= 2 * num_pairs()) continue;
      if (interleaved && dim % 2 == 0) {
        pairs.push_back(static_cast<uint32_t>(dim / 2));
      } else if (!interleaved && dim < num_pairs()) {
        pairs.push_back(static_cast<uint32_t>(dim));
      }
    }
    return pairs;
  }

  static Pairs KeptPairs(const Part& plan, int64_t kv_head) {
    const auto& kept =
        plan.rope_pairs().per_head(static_cast<int>(kv_head)).pair_indices();
    return {kept.begin(), kept.end()};
  }

  static Pairs ChannelPairs(const LatentProgram& latent) {
    Pairs pairs;
    for (const int64_t place : latent.channel_place) {
      pairs.push_back(latent.pairs[static_cast<size_t>(place)]);
    }
    return pairs;
  }

  // How the key of the rank's KV head turns: the head itself, or its latent
  // where a space of pairs stores it.
  HeadTurn TurnOfKey(const Part& plan, const PartTensors& tensors,
                     const PartProgram& part, int64_t local) const {
    HeadTurn turn{{}, spec_.rope.pairing};
    switch (plan.space_case()) {
      case Part::kFull:
        turn.pairs = FirstPairs(num_pairs());
        break;
      case Part::kLowRank:
        turn.pairs = CoveredPairs(tensors);
        break;
      case Part::kRopePairs:
        turn.pairs = KeptPairs(plan, out_.heads.kv.first + local);
        break;
      default: {
        const auto group =
            static_cast<size_t>(part.group_of_head[static_cast<size_t>(local)]);
        turn = {ChannelPairs(part.latents[group]), RopePairing::kHalfSplit};
      }
    }
    return turn;
  }

  // Dims of a head that a part's queries take, where nothing is folded.
  Indices QueryDims(const Part& plan, const PartTensors& tensors,
                    const PartProgram& part, int64_t query_head) const {
    Indices dims;
    switch (plan.space_case()) {
      case Part::kFull:
        return Iota(spec_.head_dim);
      case Part::kLowRank:
        return tensors.dims;
      case Part::kRopePairs:
        return model::PairDims(spec_.rope,
                               KeptPairs(plan, KvHeadOf(query_head)));
      default:
        dims = model::PairDims(spec_.rope, LatentOf(part, query_head).pairs);
        std::sort(dims.begin(), dims.end());
        return dims;
    }
  }

  // How a query head's rows of a part turn before they meet the keys.
  HeadTurn TurnOfQuery(const Part& plan, const PartTensors& tensors,
                       const KeyProgram& part, int64_t query_head) const {
    if (plan.has_rope_low_rank() && part.lift == QueryLift::kComplex) {
      return {LatentOf(part, query_head).pairs, spec_.rope.pairing};
    }
    // Rows that a lift was folded into are latents: they turn only with those.
    if (plan.has_low_rank() && tensors.folded) return {};
    return TurnOfKey(plan, tensors, part,
                     KvHeadOf(query_head) - out_.heads.kv.first);
  }

  void MakeQueries(const kvasir::v1::LayerPlan& plan) {
    Projection projection;
    projection.name = "self_attn.q_proj";
    projection.has_bias = spec_.qkv_bias;
    const bool folded =
        std::any_of(tensors_.key.begin(), tensors_.key.end(),
                    [](const PartTensors& tensors) { return tensors.folded; });
    // Rows of q_proj before the rank's first head.
    int64_t first_row = 0;
    for (int64_t i = 0; i < out_.heads.query.first; ++i) {
      first_row += tensors_.query_rows[static_cast<size_t>(i)];
    }
    Indices head_row;  // of each head; moves behind its parts' rows
    for (int64_t h = 0; h < out_.heads.query.count; ++h) {
      head_row.push_back(first_row);
      first_row +=
          tensors_.query_rows[static_cast<size_t>(out_.heads.query.first + h)];
    }
    for (size_t p = 0; p < out_.key.size(); ++p) {
      const Part& part_plan = plan.key().parts(static_cast<int>(p));
      const PartTensors& tensors = tensors_.key[p];
      KeyProgram& part = out_.key[p];
      for (int64_t h = 0; h < out_.heads.query.count; ++h) {
        int64_t& row = head_row[static_cast<size_t>(h)];
        const int64_t begin = column_;
        if (folded) {
          const model::LatentTensors& latent = tensors.LatentOf(KvHeadOf(h));
          const int64_t count =
              tensors.folded ? latent.channels : latent.head_dims;
          TakeRun(row, count, column_, &projection.takes);
          row += count;
          column_ += count;
        } else {
          for (const int64_t dim : QueryDims(part_plan, tensors, part, h)) {
            Take(row + dim, column_++, &projection.takes);
          }
        }
        part.projected.column.push_back(begin);
        part.projected.width.push_back(column_ - begin);
        if (out_.rotates) {
          Turn(begin, column_ - begin, TurnOfQuery(part_plan, tensors, part, h),
               &part.query_rotations);
        }
      }
      ShareTables(&part.query_rotations);
      part.query = part.projected;
    }
    out_.projections.push_back(std::move(projection));
  }

  // The columns that make the latents, and their rotation.
  void Project(const Part& plan, const PartTensors& tensors,
               PartProgram* part) {
    Projection projection;
    const bool down = plan.has_low_rank() || plan.has_rope_low_rank();
    projection.name = tensors.prefix + (down ? ".down" : "");
    projection.has_bias = down ? plan.latent_bias() : spec_.qkv_bias;
    part->source_column = column_;
    if (part->has_basis) {
      part->source_columns = spec_.num_kv_heads * spec_.head_dim;
      TakeRun(0, part->source_columns, column_, &projection.takes);
    } else {
      part->source_columns = part->latent_columns;
      part->latent_column = column_;
      for (const RowTake& take : part->range_takes) {
        TakeRun(take.row, take.count, column_ + take.column, &projection.takes);
      }
    }
    column_ += part->source_columns;
    if (plan.stored() == kvasir::v1::POST_ROPE && out_.rotates) {
      RotateSource(plan, tensors, part);
    }
    if (!part->static_ranges) part->range_takes.clear();
    out_.projections.push_back(std::move(projection));
  }

  void RotateSource(const Part& plan, const PartTensors& tensors,
                    PartProgram* part) const {
    const int64_t first = part->source_column;
    if (part->has_basis) {
      for (int64_t head = 0; head < spec_.num_kv_heads; ++head) {
        Turn(first + head * spec_.head_dim, spec_.head_dim,
             {FirstPairs(num_pairs()), spec_.rope.pairing}, &part->rotations);
      }
    } else {
      for (const LatentProgram& latent : part->latents) {
        Turn(first + latent.column, latent.width,
             TurnOfKey(plan, tensors, *part, latent.heads[0]),
             &part->rotations);
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

  void MakeOutput(const Part& plan) {
    ValueProgram& value = out_.value;
    value.lifted =
        value.has_basis || (plan.has_low_rank() && !tensors_.value[0].folded);
    for (int64_t h = 0; h < out_.heads.query.count; ++h) {
      const int64_t width = LatentOf(value, h).width;
      value.attended.column.push_back(value.attended_columns);
      value.attended.width.push_back(width);
      value.attended_columns += width;
    }
    for (int64_t i = 0; i < spec_.num_heads; ++i) {
      const int64_t own = tensors_.output_columns[static_cast<size_t>(i)];
      if (i < out_.heads.query.first) out_.output_first_column += own;
      if (out_.heads.query.Contains(i)) out_.output_columns += own;
      out_.output_all_columns += own;
    }
  }

  const model::DecoderSpec& spec_;
  const model::AttentionTensors& tensors_;
  AttentionProgram out_;
  int64_t column_ = 0;  // of a token's row, that is not taken yet
};

}  // namespace

absl::StatusOr<AttentionProgram> MakeAttentionProgram(
    const model::DecoderSpec& spec, int64_t layer,
    const kvasir::v1::LayerPlan& plan, const RankHeads& heads) {
  KVASIR_ASSIGN_OR_RETURN(const model::AttentionTensors tensors,
                          model::DescribeAttention(spec, layer, plan));
  return Maker(spec, layer, heads, tensors).Make(plan);
}

}  // namespace kvasir::worker
