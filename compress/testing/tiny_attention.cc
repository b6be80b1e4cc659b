#include "compress/testing/tiny_attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "compress/methods/rope_pairs.h"

namespace kvasir::compress {
namespace {

using kvasir::v1::Part;

constexpr int64_t kTokens = 150;

// ------------------------------------------------------------------- rotation

// Angles [T, n] of some pairs for tokens at positions 0 .. T - 1.
at::Tensor Angles(const model::RopeSpec& rope,
                  const std::vector<int64_t>& pairs, int64_t tokens) {
  std::vector<double> steps;
  for (const int64_t pair : pairs) {
    steps.push_back(rope.frequencies[static_cast<size_t>(pair)]);
  }
  return at::outer(at::arange(tokens, at::kDouble),
                   at::tensor(steps, at::kDouble));
}

std::vector<int64_t> AllPairs(const model::DecoderSpec& spec) {
  std::vector<int64_t> pairs;
  for (int64_t pair = 0; pair < spec.rope.rotary_dim / 2; ++pair) {
    pairs.push_back(pair);
  }
  return pairs;
}

// Rotates x [T, n], dims (first[i], second[i]) by the angle of pairs[i].
at::Tensor RotatePairs(const model::RopeSpec& rope, const at::Tensor& x,
                       const std::vector<int64_t>& pairs,
                       const std::vector<PairDims>& dims) {
  at::Tensor out = x.clone();
  if (pairs.empty()) return out;
  const at::Tensor angles = Angles(rope, pairs, x.size(0));
  for (size_t i = 0; i < pairs.size(); ++i) {
    const at::Tensor cos = angles.select(1, static_cast<int64_t>(i)).cos();
    const at::Tensor sin = angles.select(1, static_cast<int64_t>(i)).sin();
    const at::Tensor a = x.select(1, dims[i].first);
    const at::Tensor b = x.select(1, dims[i].second);
    out.select(1, dims[i].first).copy_(a * cos - b * sin);
    out.select(1, dims[i].second).copy_(b * cos + a * sin);
  }
  return out;
}

// Rotates a whole head [T, D].
at::Tensor RotateHead(const model::DecoderSpec& spec, const at::Tensor& x) {
  std::vector<PairDims> dims;
  for (const int64_t pair : AllPairs(spec)) {
    dims.push_back(DimsOfPair(spec.rope, pair));
  }
  return RotatePairs(spec.rope, x, AllPairs(spec), dims);
}

// The dims of some pairs, in the order of a head that has only these pairs.
std::vector<int64_t> DimsOfPairs(const model::RopeSpec& rope,
                                 const std::vector<int64_t>& pairs) {
  std::vector<int64_t> dims;
  for (const int64_t pair : pairs) dims.push_back(DimsOfPair(rope, pair).first);
  for (const int64_t pair : pairs) {
    dims.push_back(DimsOfPair(rope, pair).second);
  }
  std::sort(dims.begin(), dims.end());
  return dims;
}

// Rotates a head of only these pairs [T, 2n], in the artifact's layout.
at::Tensor RotateKept(const model::DecoderSpec& spec, const at::Tensor& x,
                      const std::vector<int64_t>& pairs) {
  std::vector<PairDims> dims;
  const auto count = static_cast<int64_t>(pairs.size());
  for (int64_t i = 0; i < count; ++i) {
    const bool interleaved =
        spec.rope.pairing == model::RopePairing::kInterleaved;
    dims.push_back(interleaved ? PairDims{2 * i, 2 * i + 1}
                               : PairDims{i, i + count});
  }
  return RotatePairs(spec.rope, x, pairs, dims);
}

// Rotates complex channels z [T, C]; channel c by the angle of pairs[c].
at::Tensor RotateComplex(const model::DecoderSpec& spec, const at::Tensor& z,
                         const std::vector<int64_t>& pairs) {
  const at::Tensor angles = Angles(spec.rope, pairs, z.size(0));
  return z * at::complex(angles.cos(), angles.sin());
}

// ---------------------------------------------------------- the whole layer

at::Tensor Project(const at::Tensor& x, const at::Tensor& weight,
                   const at::Tensor& bias) {
  const at::Tensor y = x.mm(weight.to(at::kDouble).t());
  return bias.defined() ? y + bias.to(at::kDouble) : y;
}

at::Tensor Tensor(const TensorMap& tensors, const std::string& name) {
  const auto found = tensors.find("self_attn." + name);
  return found == tensors.end() ? at::Tensor() : found->second;
}

at::Tensor Columns(const at::Tensor& x, int64_t begin, int64_t count) {
  return x.narrow(1, begin, count);
}

at::Tensor Softmax(const at::Tensor& scores, int64_t head_dim) {
  const at::Tensor above =
      at::ones(scores.sizes(), scores.options()).triu(1).to(at::kBool);
  const at::Tensor scaled = (scores / std::sqrt(static_cast<double>(head_dim)))
                                .masked_fill(above, -INFINITY);
  return at::softmax(scaled, -1);
}

// --------------------------------------------------------- a compressed side

// The tensors of a part, and the data needed to index them.
struct PartView {
  const model::DecoderSpec& spec;
  const Part& part;
  const TensorMap& tensors;
  std::string prefix;  // "k_proj." or "k_proj.part0."
  std::string lift = "up.";

  at::Tensor Get(const std::string& name) const {
    return Tensor(tensors, prefix + name);
  }
  bool folds() const {
    return part.uses_size() == 1 && part.uses(0).has_fold();
  }
};

std::vector<int64_t> Sorted(
    const google::protobuf::RepeatedField<uint32_t>& x) {
  std::vector<int64_t> values(x.begin(), x.end());
  std::sort(values.begin(), values.end());
  return values;
}

int64_t StoredWidth(const Part& part, int64_t rank) {
  const auto& schedule = part.codec().bits().schedule();
  if (schedule.size() != 8) return rank;
  return rank / 8 *
         std::count_if(schedule.begin(), schedule.end(),
                       [](uint32_t bits) { return bits > 0; });
}

// The place of a head's latent in a low-rank part, and of its rows in the lift.
struct HeadPlace {
  int group = 0;
  int64_t index = 0;                   // index of the head in its group
  int64_t begin = 0;                   // first channel
  int64_t width = 0;                   // channels, 2C for rope_low_rank
  std::vector<int64_t> channel_pairs;  // for rope_low_rank: the pair of each
                                       // channel [C]
  std::vector<int64_t> pairs;  // for rope_low_rank: the pairs of the group
};

HeadPlace PlaceOfHead(const Part& part, int64_t head) {
  HeadPlace place;
  const bool complex = part.has_rope_low_rank();
  const int count = complex ? part.rope_low_rank().groups_size()
                            : part.low_rank().groups_size();
  for (place.group = 0; place.group < count; ++place.group) {
    const auto heads =
        Sorted(complex ? part.rope_low_rank().groups(place.group).heads()
                       : part.low_rank().groups(place.group).heads());
    if (complex) {
      const auto& group = part.rope_low_rank().groups(place.group);
      place.channel_pairs.clear();
      place.pairs.assign(group.pairs().begin(), group.pairs().end());
      for (int i = 0; i < group.pairs_size(); ++i) {
        for (uint32_t t = 0; t < group.rank_per_pair(i); ++t) {
          place.channel_pairs.push_back(group.pairs(i));
        }
      }
      // Queries hold each pair once, even if it has several channels.
      std::sort(place.pairs.begin(), place.pairs.end());
      place.pairs.erase(std::unique(place.pairs.begin(), place.pairs.end()),
                        place.pairs.end());
      place.width = 2 * static_cast<int64_t>(place.channel_pairs.size());
    } else {
      place.width =
          StoredWidth(part, part.low_rank().groups(place.group).rank());
    }
    const auto found = std::find(heads.begin(), heads.end(), head);
    if (found != heads.end()) {
      place.index = found - heads.begin();
      return place;
    }
    place.begin += place.width;
  }
  return place;
}

// Ascending dims of a head that a low_rank part covers.
std::vector<int64_t> DimsOfLowRank(const PartView& view, bool key) {
  const int64_t pairs = key ? view.spec.rope.rotary_dim / 2 : 0;
  const bool no_rope = view.part.stored() == kvasir::v1::NO_ROPE;
  std::vector<int64_t> dims;
  for (const Part::Use& use : view.part.uses()) {
    const auto of_use = Sorted(use.pairs());
    const auto add =
        DimsOfPairs(view.spec.rope, use.pairs_size() == 0 && !no_rope && key
                                        ? AllPairs(view.spec)
                                        : of_use);
    dims.insert(dims.end(), add.begin(), add.end());
    if (use.pairs_size() > 0) continue;
    for (int64_t d = 2 * pairs; d < view.spec.head_dim; ++d) dims.push_back(d);
  }
  std::sort(dims.begin(), dims.end());
  return dims;
}

// Places a head's numbers at `dims` of a head of zeros: [T, D].
at::Tensor PlaceDims(const at::Tensor& x, const std::vector<int64_t>& dims,
                     int64_t head_dim) {
  at::Tensor out = at::zeros({x.size(0), head_dim}, at::kDouble);
  out.index_copy_(1, at::tensor(dims, at::kLong), x);
  return out;
}

at::Tensor PickDims(const at::Tensor& x, const std::vector<int64_t>& dims) {
  return x.index_select(1, at::tensor(dims, at::kLong));
}

// The latents of a low-rank part, for all groups.
at::Tensor Latent(const PartView& view, const at::Tensor& inputs) {
  return Project(inputs, view.Get("down.weight"), view.Get("down.bias"));
}

// Rows of the head in its group's lift, [d, R'].
at::Tensor LiftOfHead(const PartView& view, const HeadPlace& place,
                      int64_t dims) {
  return view.Get(view.lift + std::to_string(place.group) + ".weight")
      .to(at::kDouble)
      .narrow(0, place.index * dims, dims);
}

// The contribution of a part to the scores of one query head. `query` holds the
// head's rows of q_proj for this part, [T, n]; if `whole`, for all D dims.
class KeyPart {
 public:
  KeyPart(const PartView& view, const at::Tensor& inputs, int64_t kv_head)
      : view_(view), inputs_(inputs), head_(kv_head) {}

  // Number of the part's rows in q_proj, if something folds.
  int64_t QueryRows() const {
    const int64_t dims = static_cast<int64_t>(CoveredDims().size());
    if (!view_.folds()) return dims;
    if (view_.part.has_rope_pairs()) return dims;
    return PlaceOfHead(view_.part, head_).width;
  }

  at::Tensor Scores(const at::Tensor& query, bool whole) const {
    switch (view_.part.space_case()) {
      case Part::kFull:
        return FullScores(query);
      case Part::kRopePairs:
        return RopePairsScores(whole ? PickDims(query, CoveredDims()) : query);
      case Part::kRopeLowRank:
        if (view_.folds()) return CommutingFolded(query);
        return CommutingScores(Spread(query, whole));
      default:
        if (view_.folds()) return query.mm(LatentOfHead().t());
        return LowRankScores(Spread(query, whole));
    }
  }

 private:
  const model::DecoderSpec& spec() const { return view_.spec; }

  std::vector<int64_t> KeptPairs() const {
    const auto& kept = view_.part.rope_pairs()
                           .per_head(static_cast<int>(head_))
                           .pair_indices();
    return std::vector<int64_t>(kept.begin(), kept.end());
  }

  std::vector<int64_t> CoveredDims() const {
    if (view_.part.has_rope_pairs()) {
      return DimsOfPairs(spec().rope, KeptPairs());
    }
    if (view_.part.has_rope_low_rank()) {
      return DimsOfPairs(spec().rope, PlaceOfHead(view_.part, head_).pairs);
    }
    return DimsOfLowRank(view_, /*key=*/true);
  }

  at::Tensor Spread(const at::Tensor& query, bool whole) const {
    return whole ? query : PlaceDims(query, CoveredDims(), spec().head_dim);
  }

  at::Tensor LatentOfHead() const {
    const HeadPlace place = PlaceOfHead(view_.part, head_);
    return Columns(Latent(view_, inputs_), place.begin, place.width);
  }

  at::Tensor FullScores(const at::Tensor& query) const {
    const int64_t dim = spec().head_dim;
    at::Tensor keys = Project(inputs_, view_.Get("weight"), view_.Get("bias"));
    const bool rotated = view_.part.stored() == kvasir::v1::POST_ROPE;
    const auto rotate_all = [&](const at::Tensor& x) {
      std::vector<at::Tensor> heads;
      for (int64_t h = 0; h < spec().num_kv_heads; ++h) {
        heads.push_back(RotateHead(spec(), Columns(x, h * dim, dim)));
      }
      return at::cat(heads, 1);
    };
    if (rotated) keys = rotate_all(keys);
    const at::Tensor basis = view_.Get("basis.weight");
    if (basis.defined()) {
      const at::Tensor mean = view_.Get("basis.mean");
      const at::Tensor rows = basis.to(at::kDouble);
      if (mean.defined()) keys = keys - mean.to(at::kDouble);
      keys = keys.mm(rows.t()).mm(rows);
      if (mean.defined()) keys = keys + mean.to(at::kDouble);
    }
    if (!rotated) keys = rotate_all(keys);
    return RotateHead(spec(), query).mm(Columns(keys, head_ * dim, dim).t());
  }

  at::Tensor RopePairsScores(const at::Tensor& query) const {
    const std::vector<int64_t> pairs = KeptPairs();
    const auto rows = 2 * static_cast<int64_t>(pairs.size());
    const at::Tensor keys =
        Columns(Project(inputs_, view_.Get("weight"), view_.Get("bias")),
                head_ * rows, rows);
    return RotateKept(spec(), query, pairs)
        .mm(RotateKept(spec(), keys, pairs).t());
  }

  // The head's channels, rotated, [T, C] complex.
  at::Tensor Channels() const {
    const HeadPlace place = PlaceOfHead(view_.part, head_);
    const int64_t channels = place.width / 2;
    const at::Tensor latent = LatentOfHead();
    return RotateComplex(
        spec(),
        at::complex(Columns(latent, 0, channels).contiguous(),
                    Columns(latent, channels, channels).contiguous()),
        place.channel_pairs);
  }

  static at::Tensor RealProduct(const at::Tensor& query,
                                const at::Tensor& channels) {
    return at::real(query.conj().mm(channels.t()));
  }

  at::Tensor CommutingFolded(const at::Tensor& query) const {
    const HeadPlace place = PlaceOfHead(view_.part, head_);
    const int64_t channels = place.width / 2;
    const at::Tensor lifted = RotateComplex(
        spec(),
        at::complex(Columns(query, 0, channels).contiguous(),
                    Columns(query, channels, channels).contiguous()),
        place.channel_pairs);
    return RealProduct(lifted, Channels());
  }

  at::Tensor CommutingScores(const at::Tensor& query) const {
    const HeadPlace place = PlaceOfHead(view_.part, head_);
    const at::Tensor up =
        view_.Get("up." + std::to_string(place.group) + ".weight")
            .to(at::kDouble)[place.index];  // [2, C]
    const at::Tensor u = at::complex(up[0].contiguous(), up[1].contiguous());
    std::vector<at::Tensor> lifted;
    for (const int64_t pair : place.channel_pairs) {
      const PairDims dims = DimsOfPair(spec().rope, pair);
      lifted.push_back(at::complex(query.select(1, dims.first).contiguous(),
                                   query.select(1, dims.second).contiguous()));
    }
    const at::Tensor moved = at::stack(lifted, 1) * u.conj().unsqueeze(0);
    return RealProduct(RotateComplex(spec(), moved, place.channel_pairs),
                       Channels());
  }

  at::Tensor LowRankScores(const at::Tensor& query) const {
    const std::vector<int64_t> dims = CoveredDims();
    const auto count = static_cast<int64_t>(dims.size());
    const HeadPlace place = PlaceOfHead(view_.part, head_);
    at::Tensor keys = LatentOfHead().mm(LiftOfHead(view_, place, count).t());
    const at::Tensor bias = view_.Get(view_.lift + "bias");
    if (bias.defined()) {
      keys = keys + bias.to(at::kDouble).narrow(0, head_ * count, count);
    }
    const at::Tensor placed = PlaceDims(keys, dims, spec().head_dim);
    if (view_.part.stored() == kvasir::v1::NO_ROPE) {
      return query.mm(placed.t());
    }
    return RotateHead(spec(), query).mm(RotateHead(spec(), placed).t());
  }

  const PartView& view_;
  const at::Tensor& inputs_;
  int64_t head_;
};

// The part with only the uses of one side.
Part OfSide(Part part, kvasir::v1::Serves serves) {
  auto* uses = part.mutable_uses();
  uses->erase(std::remove_if(uses->begin(), uses->end(),
                             [serves](const Part::Use& use) {
                               return use.serves() != serves;
                             }),
              uses->end());
  return part;
}

std::vector<PartView> Views(const model::DecoderSpec& spec,
                            const kvasir::v1::SidePlan& side,
                            const TensorMap& tensors, const std::string& name) {
  std::vector<PartView> views;
  for (int p = 0; p < side.parts_size(); ++p) {
    const std::string prefix = side.parts_size() == 1
                                   ? name + "."
                                   : name + ".part" + std::to_string(p) + ".";
    views.push_back({spec, side.parts(p), tensors, prefix});
  }
  return views;
}

// The values that a query head attends to, [T, n], before o_proj.
at::Tensor ValuesOfHead(const PartView& view, const at::Tensor& inputs,
                        int64_t kv_head) {
  const int64_t dim = view.spec.head_dim;
  if (view.part.has_full()) {
    at::Tensor values = Project(inputs, view.Get("weight"), view.Get("bias"));
    const at::Tensor basis = view.Get("basis.weight");
    if (basis.defined()) {
      const at::Tensor rows = basis.to(at::kDouble);
      const at::Tensor mean = view.Get("basis.mean").defined()
                                  ? view.Get("basis.mean").to(at::kDouble)
                                  : at::zeros({rows.size(1)}, at::kDouble);
      values = (values - mean).mm(rows.t()).mm(rows) + mean;
    }
    return Columns(values, kv_head * dim, dim);
  }
  const HeadPlace place = PlaceOfHead(view.part, kv_head);
  const at::Tensor latent =
      Columns(Latent(view, inputs), place.begin, place.width);
  if (view.folds()) return latent;
  return latent.mm(LiftOfHead(view, place, dim).t());
}

// -------------------------------------------------------------- random models

AttentionWeights RandomWeights(const TinyShape& shape) {
  const int64_t queries = shape.num_heads * shape.head_dim;
  const int64_t keys = shape.num_kv_heads * shape.head_dim;
  const auto matrix = [](int64_t rows, int64_t columns) {
    return at::randn({rows, columns}, at::kFloat) /
           std::sqrt(static_cast<double>(columns));
  };
  AttentionWeights weights;
  weights.query = matrix(queries, shape.hidden_size);
  weights.key = matrix(keys, shape.hidden_size);
  weights.value = matrix(keys, shape.hidden_size);
  weights.output = matrix(shape.hidden_size, queries);
  if (shape.qkv_bias) {
    weights.query_bias = at::randn({queries}, at::kFloat);
    weights.key_bias = at::randn({keys}, at::kFloat);
    weights.value_bias = at::randn({keys}, at::kFloat);
  }
  return weights;
}

LayerCalibration Calibrate(const model::DecoderSpec& spec,
                           const AttentionWeights& weights,
                           const at::Tensor& inputs) {
  LayerCalibration layer;
  layer.input_gram = inputs.t().mm(inputs);
  layer.input_sum = inputs.sum(0);
  layer.query_energy = Project(inputs, weights.query, weights.query_bias)
                           .square()
                           .mean(0)
                           .view({spec.num_heads, spec.head_dim});
  const int64_t rows = weights.key.size(0);
  layer.key_fisher = at::rand({rows}, at::kDouble);
  layer.value_fisher = at::rand({rows}, at::kDouble) * 3;
  layer.key_fisher_root = layer.key_fisher.sqrt();
  layer.value_fisher_root = layer.value_fisher.sqrt();
  const at::Tensor keys = Project(inputs, weights.key, weights.key_bias);
  std::vector<at::Tensor> rotated;
  for (int64_t head = 0; head < spec.num_kv_heads; ++head) {
    rotated.push_back(
        RotateHead(spec, Columns(keys, head * spec.head_dim, spec.head_dim)));
  }
  const at::Tensor all = at::cat(rotated, 1);
  layer.rotated_key_gram = all.t().mm(all);
  layer.rotated_key_sum = all.sum(0);
  return layer;
}

}  // namespace

TinyLayers MakeTinyLayers(const TinyShape& shape, uint64_t seed) {
  at::set_num_threads(1);  // at these sizes more threads are slower
  at::manual_seed(seed);
  TinyLayers tiny;
  model::DecoderSpec& spec = tiny.spec;
  spec.hidden_size = shape.hidden_size;
  spec.num_heads = shape.num_heads;
  spec.num_kv_heads = shape.num_kv_heads;
  spec.head_dim = shape.head_dim;
  spec.intermediate_size = shape.hidden_size;
  spec.vocab_size = 10;
  spec.qkv_bias = shape.qkv_bias;
  spec.rope.rotary_dim = shape.rotary_dim;
  spec.rope.pairing = shape.pairing;
  for (int64_t pair = 0; pair < shape.rotary_dim / 2; ++pair) {
    spec.rope.frequencies.push_back(
        std::pow(50.0, -2.0 * static_cast<double>(pair) /
                           static_cast<double>(shape.rotary_dim)));
  }
  spec.layers.resize(static_cast<size_t>(shape.num_layers));
  const at::Tensor scales = at::rand({shape.hidden_size}, at::kDouble) + 0.1;
  tiny.inputs =
      (at::randn({kTokens, shape.hidden_size}, at::kDouble) + 0.4) * scales;
  tiny.calibration.id = "tiny";
  tiny.calibration.num_tokens = kTokens;
  tiny.calibration.num_sequences = 1;
  for (int64_t l = 0; l < shape.num_layers; ++l) {
    tiny.weights.push_back(RandomWeights(shape));
    tiny.calibration.layers.push_back(
        Calibrate(spec, tiny.weights.back(), tiny.inputs));
  }
  const int64_t width = spec.num_kv_heads * spec.head_dim;
  for (LayerCalibration& layer : tiny.calibration.layers) {
    for (at::Tensor* information :
         {&layer.key_information, &layer.value_information}) {
      const at::Tensor gradients = at::randn({2 * width, width}, at::kDouble) *
                                   (at::rand({width}, at::kDouble) + 0.1);
      *information = gradients.t().mm(gradients);
    }
  }
  return tiny;
}

PlanRequest TinyPlanRequest(const TinyLayers& tiny, double keep) {
  PlanRequest request;
  request.spec = tiny.spec;
  request.calibration = &tiny.calibration;
  request.weights = [&tiny](int64_t layer) -> absl::StatusOr<AttentionWeights> {
    return tiny.weights[static_cast<size_t>(layer)];
  };
  request.keep = keep;
  request.rank_multiple = 1;
  request.key_codec.set_dtype(kvasir::v1::F32);
  request.value_codec.set_dtype(kvasir::v1::F32);
  return request;
}

ApplyRequest TinyApplyRequest(const TinyLayers& tiny,
                              const kvasir::v1::KvPlan& plan, int64_t layer) {
  ApplyRequest request;
  request.spec = &tiny.spec;
  request.plan = &plan.layers(static_cast<int>(layer));
  request.layer = layer;
  request.weights = tiny.weights[static_cast<size_t>(layer)];
  request.calibration = &tiny.calibration.layers[static_cast<size_t>(layer)];
  request.num_tokens = tiny.calibration.num_tokens;
  request.commuting = CommutingWeightsOf(plan);
  return request;
}

TinyAttention AttendWhole(const model::DecoderSpec& spec,
                          const AttentionWeights& weights,
                          const at::Tensor& inputs,
                          const at::Tensor& key_mask) {
  const at::Tensor queries = Project(inputs, weights.query, weights.query_bias);
  at::Tensor keys = Project(inputs, weights.key, weights.key_bias);
  if (key_mask.defined()) keys = keys * key_mask.flatten();
  const at::Tensor values = Project(inputs, weights.value, weights.value_bias);
  std::vector<at::Tensor> scores;
  std::vector<at::Tensor> mixed;
  const int64_t dim = spec.head_dim;
  for (int64_t head = 0; head < spec.num_heads; ++head) {
    const int64_t kv = head / (spec.num_heads / spec.num_kv_heads);
    const at::Tensor query =
        RotateHead(spec, Columns(queries, head * dim, dim));
    const at::Tensor key = RotateHead(spec, Columns(keys, kv * dim, dim));
    scores.push_back(query.mm(key.t()));
    mixed.push_back(
        Softmax(scores.back(), dim).mm(Columns(values, kv * dim, dim)));
  }
  return {at::stack(scores, 0),
          Project(at::cat(mixed, 1), weights.output, weights.output_bias)};
}

TinyAttention AttendCompressed(const model::DecoderSpec& spec,
                               const kvasir::v1::LayerPlan& plan,
                               const TensorMap& tensors,
                               const at::Tensor& inputs) {
  std::vector<PartView> keys = Views(spec, plan.key(), tensors, "k_proj");
  std::vector<PartView> values = Views(spec, plan.value(), tensors, "v_proj");
  Part joint_key;
  Part joint_value;
  if (plan.joint_size() > 0) {
    joint_key = OfSide(plan.joint(0), kvasir::v1::SERVES_KEY);
    joint_value = OfSide(plan.joint(0), kvasir::v1::SERVES_VALUE);
    keys.push_back({spec, joint_key, tensors, "kv_proj.", "up_key."});
    values.push_back({spec, joint_value, tensors, "kv_proj.", "up_value."});
  }
  const bool split = std::any_of(keys.begin(), keys.end(),
                                 [](const PartView& p) { return p.folds(); });
  const at::Tensor queries = Project(inputs, Tensor(tensors, "q_proj.weight"),
                                     Tensor(tensors, "q_proj.bias"));
  std::vector<at::Tensor> scores;
  std::vector<at::Tensor> mixed;
  int64_t begin = 0;
  for (int64_t head = 0; head < spec.num_heads; ++head) {
    const int64_t kv = head / (spec.num_heads / spec.num_kv_heads);
    at::Tensor sum = at::zeros({inputs.size(0), inputs.size(0)}, at::kDouble);
    for (const PartView& view : keys) {
      const KeyPart part(view, inputs, kv);
      const int64_t rows = split ? part.QueryRows() : spec.head_dim;
      sum = sum + part.Scores(Columns(queries, begin, rows), !split);
      if (split) begin += rows;
    }
    if (!split) begin += spec.head_dim;
    scores.push_back(sum);
    mixed.push_back(
        Softmax(sum, spec.head_dim).mm(ValuesOfHead(values[0], inputs, kv)));
  }
  return {at::stack(scores, 0),
          Project(at::cat(mixed, 1), Tensor(tensors, "o_proj.weight"),
                  Tensor(tensors, "o_proj.bias"))};
}

double RelativeError(const at::Tensor& have, const at::Tensor& want) {
  return ((have - want).norm() / want.norm()).item<double>();
}

double RelativeError(const TinyAttention& have, const TinyAttention& want) {
  return std::max(RelativeError(have.scores, want.scores),
                  RelativeError(have.output, want.output));
}

}  // namespace kvasir::compress
