// Tests identities for every kind of part (plan::Space): a plan's tensors must
// compute the same as a full layer with equivalent projections. The tests make
// the tensors from random factors by the rules of docs/artifact.md.
#include "compress/oracle/layer_forward.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "compress/oracle/attention_core.h"
#include "compress/oracle/key_bias.h"
#include "gmock/gmock.h"
#include "model/shapes/attention_shape.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

using Indices = std::vector<int64_t>;

constexpr int64_t kModelDim = 20;
constexpr int64_t kLength = 9;

struct Shape {
  const char* name;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;
  model::RopePairing pairing;
  bool rope;
  bool bias;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

// The shapes cover GQA and MHA, both RoPE pairings, partly rotary heads, no
// RoPE, and layers with and without biases.
const Shape kShapes[] = {
    {"gqa", 4, 2, 8, 8, model::RopePairing::kHalfSplit, true, false},
    {"mha with biases", 4, 4, 8, 8, model::RopePairing::kHalfSplit, true, true},
    {"interleaved", 8, 4, 6, 6, model::RopePairing::kInterleaved, true, true},
    {"partial", 4, 4, 10, 6, model::RopePairing::kHalfSplit, true, true},
    {"partial interleaved", 4, 2, 10, 6, model::RopePairing::kInterleaved, true,
     false},
    {"no rope", 6, 2, 6, 6, model::RopePairing::kHalfSplit, false, true},
};

model::DecoderSpec SpecOf(const Shape& shape) {
  model::DecoderSpec spec;
  spec.hidden_size = kModelDim;
  spec.num_heads = shape.heads;
  spec.num_kv_heads = shape.kv_heads;
  spec.head_dim = shape.head_dim;
  spec.intermediate_size = 12;
  spec.vocab_size = 11;
  spec.max_position_embeddings = 64;
  spec.rope.rotary_dim = shape.rotary_dim;
  spec.rope.pairing = shape.pairing;
  for (int64_t f = 0; f < shape.rotary_dim / 2; ++f) {
    spec.rope.frequencies.push_back(std::pow(0.3, static_cast<double>(f)));
  }
  spec.qkv_bias = shape.bias;
  spec.layers.push_back({.rope = shape.rope});
  return spec;
}

at::Tensor Random(Indices sizes) { return at::randn(sizes) * 0.4; }

// One layer of a model: its tensors, and an input x for its attention.
struct Layer {
  model::DecoderSpec spec;
  TensorMap tensors;  // uncompressed, or those of a plan
  at::Tensor x = at::randn({2, kLength, kModelDim});

  int64_t query_dims() const { return spec.num_heads * spec.head_dim; }
  int64_t kv_dims() const { return spec.num_kv_heads * spec.head_dim; }
  int64_t share() const { return spec.num_heads / spec.num_kv_heads; }
  int64_t pairs() const {
    return spec.layers[0].rope ? spec.rope.rotary_dim / 2 : 0;
  }
  at::Tensor& operator[](const std::string& name) {
    return tensors["self_attn." + name];
  }
  // Returns the two dims of a pair in a head.
  std::pair<int64_t, int64_t> PairDims(int64_t pair) const {
    if (spec.rope.pairing == model::RopePairing::kInterleaved) {
      return {2 * pair, 2 * pair + 1};
    }
    return {pair, pair + pairs()};
  }
};

Layer MakeLayer(const Shape& shape) {
  at::manual_seed(11);
  Layer layer;
  layer.spec = SpecOf(shape);
  layer["q_proj.weight"] = Random({layer.query_dims(), kModelDim});
  layer["k_proj.weight"] = Random({layer.kv_dims(), kModelDim});
  layer["v_proj.weight"] = Random({layer.kv_dims(), kModelDim});
  layer["o_proj.weight"] = Random({kModelDim, layer.query_dims()});
  if (shape.bias) {
    layer["q_proj.bias"] = Random({layer.query_dims()});
    layer["k_proj.bias"] = Random({layer.kv_dims()});
    layer["v_proj.bias"] = Random({layer.kv_dims()});
  }
  return layer;
}

kvasir::v1::LayerPlan FullPlan(const Layer& layer) {
  kvasir::v1::LayerPlan plan;
  kvasir::v1::Part* key = plan.mutable_key()->add_parts();
  key->mutable_full();
  key->mutable_codec()->set_dtype(kvasir::v1::F32);
  *plan.mutable_value() = plan.key();
  plan.mutable_value()->mutable_parts(0)->set_stored(kvasir::v1::NO_ROPE);
  key->set_stored(layer.pairs() > 0 ? kvasir::v1::POST_ROPE
                                    : kvasir::v1::NO_ROPE);
  return plan;
}

// Returns an eviction at every token with rolling positions: keys are rotated
// for the index of their slot. Heads evict separately, or all together if
// `together` is true.
kvasir::v1::Eviction Rolling(const Layer& layer, bool together = false) {
  kvasir::v1::Eviction eviction;
  eviction.set_budget(4);
  eviction.set_sinks(1);
  eviction.set_recent(1);
  eviction.set_lambda(1);
  eviction.set_every_tokens(1);
  eviction.set_positions(kvasir::v1::Eviction::ROLLING);
  for (int64_t h = 0; h < layer.spec.num_kv_heads; ++h) {
    if (h == 0 || !together) eviction.add_units();
    eviction.mutable_units()->rbegin()->add_heads(static_cast<uint32_t>(h));
  }
  return eviction;
}

absl::StatusOr<at::Tensor> Attention(const Layer& layer,
                                     const kvasir::v1::LayerPlan* plan,
                                     const LayerHooks& hooks = {}) {
  if (plan != nullptr) {
    kvasir::v1::KvPlan whole;
    whole.set_schema_version(1);
    *whole.add_layers() = *plan;
    KVASIR_EXPECT_OK(
        plan::ValidatePlan(whole, model::AttentionShapeOf(layer.spec)));
  }
  auto program = MakeLayerProgram(layer.spec, plan, 0);
  if (!program.ok()) return program.status();
  const Rotation rotation =
      MakeRotation(layer.spec.rope, 32, at::TensorOptions());
  for (const model::RequiredTensor& want : program->attention_tensors) {
    const auto have = layer.tensors.find(want.name);
    if (have == layer.tensors.end()) {
      ADD_FAILURE() << "no tensor " << want.name;
    } else {
      EXPECT_EQ(have->second.sizes(), c10::IntArrayRef(want.shape))
          << want.name;
    }
  }
  return AttentionForward(*program, layer.tensors, rotation, layer.x, hooks);
}

// Expects that both layers give the same output.
void ExpectSame(const absl::StatusOr<at::Tensor>& have,
                const absl::StatusOr<at::Tensor>& want,
                double tolerance = 2e-5) {
  KVASIR_ASSERT_OK(have);
  KVASIR_ASSERT_OK(want);
  const double scale = want->abs().max().item<double>();
  EXPECT_LT((*have - *want).abs().max().item<double>() / scale, tolerance);
}

// Returns two groups of heads that are not adjacent, or one group of all heads.
std::vector<Indices> Groups(const Layer& layer, bool scattered) {
  std::vector<Indices> groups(scattered ? 2 : 1);
  for (int64_t h = 0; h < layer.spec.num_kv_heads; ++h) {
    groups[scattered ? static_cast<size_t>((h + 1) % 2) : 0].push_back(h);
  }
  return groups;
}

// The result of AddLowRank. AddLowRank makes `part` a low-rank part over `d`
// dims of each head and puts random factors into `layer` under `prefix`. `rows`
// [Hkv * d, M] and `bias` are the rows of an ordinary projection with the same
// result.
struct LowRank {
  at::Tensor rows;
  at::Tensor bias;
  std::vector<at::Tensor> up;  // one tensor [heads * d, R] for each group
  Indices group_of_head;
  Indices place_in_group;
  Indices ranks;
};

LowRank AddLowRank(Layer& layer, kvasir::v1::Part& part,
                   const std::string& prefix, int64_t d, bool scattered,
                   bool fold) {
  LowRank made;
  const int64_t kv_heads = layer.spec.num_kv_heads;
  made.rows = at::zeros({kv_heads, d, kModelDim});
  made.bias = at::zeros({kv_heads, d});
  made.group_of_head.resize(static_cast<size_t>(kv_heads));
  made.place_in_group = made.group_of_head;
  const std::vector<Indices> groups = Groups(layer, scattered);
  std::vector<at::Tensor> downs;
  std::vector<at::Tensor> biases;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto heads = static_cast<int64_t>(groups[g].size());
    const int64_t rank = std::min(heads * d, static_cast<int64_t>(3 + 2 * g));
    auto* group = part.mutable_low_rank()->add_groups();
    group->set_rank(static_cast<uint32_t>(rank));
    const at::Tensor down = Random({rank, kModelDim});
    const at::Tensor bias = Random({rank});
    const at::Tensor up = Random({heads * d, rank});
    for (size_t i = 0; i < groups[g].size(); ++i) {
      const int64_t head = groups[g][i];
      group->add_heads(static_cast<uint32_t>(head));
      made.group_of_head[static_cast<size_t>(head)] = static_cast<int64_t>(g);
      made.place_in_group[static_cast<size_t>(head)] = static_cast<int64_t>(i);
      const at::Tensor own = up.view({heads, d, rank})[static_cast<int64_t>(i)];
      made.rows[head].copy_(at::matmul(own, down));
      made.bias[head].copy_(at::mv(own, bias));
    }
    if (!fold) layer[absl::StrCat(prefix, ".up.", g, ".weight")] = up;
    made.up.push_back(up);
    made.ranks.push_back(rank);
    downs.push_back(down);
    biases.push_back(bias);
  }
  part.set_latent_bias(true);
  layer[prefix + ".down.weight"] = at::cat(downs);
  layer[prefix + ".down.bias"] = at::cat(biases);
  auto* use = part.add_uses();
  if (fold) use->mutable_fold();
  return made;
}

kvasir::v1::Part* OnlyPart(kvasir::v1::SidePlan* side) {
  kvasir::v1::Part* part = side->mutable_parts(0);
  part->clear_full();
  return part;
}

class IdentityTest : public testing::TestWithParam<Shape> {
 protected:
  Layer layer_ = MakeLayer(GetParam());
};
// Test fixtures for layers with RoPE (Rotating), and for layers in which RoPE
// rotates only a part of each head (PartialRotary).
class RotatingIdentityTest : public IdentityTest {};
class PartialRotaryIdentityTest : public IdentityTest {};

TEST_P(IdentityTest,
       WholeKeysStoredBeforeOrAfterTheRotationGiveTheUncompressedLayer) {
  const auto want = Attention(layer_, nullptr);
  kvasir::v1::LayerPlan plan = FullPlan(layer_);
  ExpectSame(Attention(layer_, &plan), want);
  if (layer_.pairs() == 0) return;
  plan.mutable_key()->mutable_parts(0)->set_stored(kvasir::v1::PRE_ROPE);
  ExpectSame(Attention(layer_, &plan), want);
}

TEST_P(IdentityTest, RebuiltLowRankKeysEqualKeysOfTheProductOfTheFactors) {
  for (const bool scattered : {false, true}) {
    Layer full = layer_;
    Layer low = layer_;
    kvasir::v1::LayerPlan plan = FullPlan(layer_);
    kvasir::v1::Part* part = OnlyPart(plan.mutable_key());
    part->set_stored(layer_.pairs() > 0 ? kvasir::v1::PRE_ROPE
                                        : kvasir::v1::NO_ROPE);
    part->set_mean(true);
    const LowRank made = AddLowRank(low, *part, "k_proj", layer_.spec.head_dim,
                                    scattered, false);
    part->mutable_uses(0)->mutable_reconstruct();
    low["k_proj.up.bias"] = Random({layer_.kv_dims()});
    full["k_proj.weight"] = made.rows.reshape({-1, kModelDim});
    full["k_proj.bias"] = made.bias.flatten() + low["k_proj.up.bias"];
    full.spec.qkv_bias = true;
    if (!layer_.spec.qkv_bias) {
      full["q_proj.bias"] = at::zeros({layer_.query_dims()});
      full["v_proj.bias"] = at::zeros({layer_.kv_dims()});
    }
    ExpectSame(Attention(low, &plan), Attention(full, nullptr));
  }
}

// Values are low-rank, W_v = up down, plus a constant. The constant is part of
// o_proj's bias.
TEST_P(IdentityTest,
       ValuesLiftedAtRunTimeOrByFoldedWeightsEqualTheProductOfTheFactors) {
  for (const bool scattered : {false, true}) {
    for (const bool fold : {false, true}) {
      Layer full = layer_;
      Layer low = layer_;
      kvasir::v1::LayerPlan plan = FullPlan(layer_);
      kvasir::v1::Part* part = OnlyPart(plan.mutable_value());
      const LowRank made = AddLowRank(low, *part, "v_proj",
                                      layer_.spec.head_dim, scattered, fold);
      part->set_mean(true);
      if (!fold) part->mutable_uses(0)->mutable_at_runtime();
      const at::Tensor constant =
          Random({layer_.spec.num_kv_heads, layer_.spec.head_dim});
      const at::Tensor output = layer_["o_proj.weight"];
      low["o_proj.bias"] = at::mv(
          output, constant.repeat_interleave(layer_.share(), 0).flatten());
      if (fold) {
        std::vector<at::Tensor> columns;
        for (int64_t i = 0; i < layer_.spec.num_heads; ++i) {
          const auto head = static_cast<size_t>(i / layer_.share());
          const at::Tensor& up =
              made.up[static_cast<size_t>(made.group_of_head[head])];
          const int64_t d = layer_.spec.head_dim;
          columns.push_back(
              at::matmul(output.slice(1, i * d, (i + 1) * d),
                         up.slice(0, made.place_in_group[head] * d,
                                  (made.place_in_group[head] + 1) * d)));
        }
        low["o_proj.weight"] = at::cat(columns, 1);
      }
      full["v_proj.weight"] = made.rows.reshape({-1, kModelDim});
      full["v_proj.bias"] = (made.bias + constant).flatten();
      full.spec.qkv_bias = true;
      if (!layer_.spec.qkv_bias) {
        full["q_proj.bias"] = at::zeros({layer_.query_dims()});
        full["k_proj.bias"] = at::zeros({layer_.kv_dims()});
      }
      ExpectSame(Attention(low, &plan), Attention(full, nullptr));
    }
  }
}

// The result of AddKeyAndValue, which makes a joint part with random factors.
// Holds the rows of ordinary key and value projections with the same result.
struct KeyAndValue {
  LowRank key;
  LowRank value;
};

KeyAndValue AddKeyAndValue(Layer& layer, kvasir::v1::Part& part,
                           bool scattered) {
  const int64_t d = layer.spec.head_dim;
  KeyAndValue made;
  made.key = AddLowRank(layer, part, "kv_proj", d, scattered, /*fold=*/true);
  made.value = made.key;
  made.value.rows = at::zeros_like(made.key.rows);
  made.value.bias = at::zeros_like(made.key.bias);
  part.clear_uses();
  auto* use = part.add_uses();
  use->mutable_reconstruct();
  use->set_serves(kvasir::v1::SERVES_KEY);
  use = part.add_uses();
  use->mutable_at_runtime();
  use->set_serves(kvasir::v1::SERVES_VALUE);
  part.set_stored(layer.pairs() > 0 ? kvasir::v1::PRE_ROPE
                                    : kvasir::v1::NO_ROPE);
  const at::Tensor down = layer["kv_proj.down.weight"];
  const at::Tensor bias = layer["kv_proj.down.bias"];
  int64_t channel = 0;
  for (int g = 0; g < part.low_rank().groups_size(); ++g) {
    const auto& group = part.low_rank().groups(g);
    const int64_t rank = group.rank();
    const at::Tensor up = Random({group.heads_size() * d, rank});
    layer[absl::StrCat("kv_proj.up_key.", g, ".weight")] =
        made.key.up[static_cast<size_t>(g)];
    layer[absl::StrCat("kv_proj.up_value.", g, ".weight")] = up;
    for (int i = 0; i < group.heads_size(); ++i) {
      const at::Tensor own = up.slice(0, i * d, (i + 1) * d);
      made.value.rows[group.heads(i)].copy_(
          at::matmul(own, down.slice(0, channel, channel + rank)));
      made.value.bias[group.heads(i)].copy_(
          at::mv(own, bias.slice(0, channel, channel + rank)));
    }
    channel += rank;
  }
  return made;
}

TEST_P(IdentityTest, AJointLatentIsLiftedToKeysAndToValues) {
  for (const bool scattered : {false, true}) {
    Layer full = layer_;
    Layer low = layer_;
    kvasir::v1::LayerPlan plan;
    kvasir::v1::Part* part = plan.add_joint();
    part->mutable_codec()->set_dtype(kvasir::v1::F32);
    part->set_mean(true);
    const KeyAndValue made = AddKeyAndValue(low, *part, scattered);
    low["kv_proj.up_key.bias"] = Random({layer_.kv_dims()});
    const at::Tensor constant =
        Random({layer_.spec.num_kv_heads, layer_.spec.head_dim});
    low["o_proj.bias"] =
        at::mv(layer_["o_proj.weight"],
               constant.repeat_interleave(layer_.share(), 0).flatten());
    full["k_proj.weight"] = made.key.rows.reshape({-1, kModelDim});
    full["k_proj.bias"] = made.key.bias.flatten() + low["kv_proj.up_key.bias"];
    full["v_proj.weight"] = made.value.rows.reshape({-1, kModelDim});
    full["v_proj.bias"] = (made.value.bias + constant).flatten();
    full.spec.qkv_bias = true;
    if (!layer_.spec.qkv_bias) {
      full["q_proj.bias"] = at::zeros({layer_.query_dims()});
    }
    ExpectSame(Attention(low, &plan), Attention(full, nullptr));
  }
}

// Counts how often latents and codes of a layer are reported.
class LatentCounter : public LayerObserver {
 public:
  void OnLatent(int64_t, plan::Side, int, const at::Tensor&) override {
    ++latents;
  }
  bool WantsCodes() const override { return true; }
  void OnCodes(int64_t, plan::Side, int, int64_t, const CodedLatent&) override {
    ++codes;
  }

  int latents = 0;
  int codes = 0;
};

// A joint latent gives the same result as two equal latents, one for keys and
// one for values, but is coded only once. This must hold for any codec, window
// and eviction. In evictions, the error of its codes counts for keys and for
// values.
TEST_P(IdentityTest, CodingAJointLatentOnceEqualsCodingTwoEqualLatents) {
  for (const auto& [ranges, evicts] : std::vector<std::pair<bool, bool>>{
           {false, false}, {true, false}, {false, true}}) {
    Layer joint = layer_;
    kvasir::v1::LayerPlan plan;
    for (auto* side : {plan.mutable_key(), plan.mutable_value()}) {
      side->set_exact_window(3);
    }
    if (evicts) {
      kvasir::v1::Eviction* eviction = plan.mutable_eviction();
      eviction->set_budget(5);
      eviction->set_recent(3);
      eviction->set_lambda(0.5);
      eviction->set_every_tokens(1);
      eviction->set_positions(kvasir::v1::Eviction::ORIGINAL);
    }
    kvasir::v1::LayerPlan two = plan;
    kvasir::v1::Part* part = plan.add_joint();
    part->mutable_codec()->mutable_bits()->add_schedule(3);
    if (ranges) {
      part->mutable_codec()->mutable_channel_static();
    } else {
      part->mutable_codec()->mutable_per_token();
      part->mutable_codec()->set_param_dtype(kvasir::v1::F16);
    }
    AddKeyAndValue(joint, *part, /*scattered=*/true);
    if (layer_.spec.qkv_bias) {
      joint["kv_proj.up_key.bias"] = Random({layer_.kv_dims()});
      joint["o_proj.bias"] = Random({kModelDim});
    }
    if (ranges) {
      const int64_t width = joint["kv_proj.down.weight"].size(0);
      joint["kv_proj.range.min"] = at::full({width}, -1.0);
      joint["kv_proj.range.scale"] = at::full({width}, 0.25);
    }
    Layer apart = joint;
    for (const bool key : {true, false}) {
      kvasir::v1::Part* own =
          (key ? two.mutable_key() : two.mutable_value())->add_parts();
      *own = *part;
      own->clear_uses();
      *own->add_uses() = part->uses(key ? 0 : 1);
      if (!key) own->set_stored(kvasir::v1::NO_ROPE);
      for (const auto& [name, tensor] : joint.tensors) {
        std::string renamed = name;
        const auto replace = [&renamed](const std::string& from,
                                        const std::string& to) {
          const size_t at = renamed.find(from);
          if (at == std::string::npos) return;
          renamed.replace(at, from.size(), to);
        };
        if (name.find(key ? ".up_value." : ".up_key.") != std::string::npos) {
          continue;
        }
        replace(".kv_proj.", key ? ".k_proj." : ".v_proj.");
        replace(key ? ".up_key." : ".up_value.", ".up.");
        apart.tensors[renamed] = tensor;
      }
    }
    ClampCount joint_clamps;
    ClampCount two_clamps;
    LatentCounter counter;
    const auto have = Attention(
        joint, &plan, {.observer = &counter, .clamp_count = &joint_clamps});
    const auto want = Attention(apart, &two, {.clamp_count = &two_clamps});
    ExpectSame(have, want, 1e-7);
    EXPECT_EQ(counter.latents, 1);
    EXPECT_EQ(counter.codes, 2);  // one call per group
    EXPECT_EQ(2 * joint_clamps.codes.load(), two_clamps.codes.load());
    EXPECT_EQ(2 * joint_clamps.clamped.load(), two_clamps.clamped.load());
    EXPECT_EQ(joint_clamps.clamped.load() > 0, ranges);
  }
}

// Returns the RoPE pairs that a head keeps; they differ between heads.
Indices KeptPairs(const Layer& layer, int64_t head) {
  Indices kept;
  for (int64_t f = 0; f < layer.pairs(); ++f) {
    if (f != head % layer.pairs()) kept.push_back(f);
  }
  return kept;
}

// Returns the dims of some RoPE pairs of a head, in the order that they would
// have in a head with only these pairs.
Indices RowsOfPairs(const Layer& layer, const Indices& pairs) {
  Indices first;
  Indices second;
  Indices woven;
  for (const int64_t pair : pairs) {
    first.push_back(layer.PairDims(pair).first);
    second.push_back(layer.PairDims(pair).second);
    woven.push_back(first.back());
    woven.push_back(second.back());
  }
  if (layer.spec.rope.pairing == model::RopePairing::kInterleaved) return woven;
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

at::Tensor SelectHeadRows(const at::Tensor& rows, int64_t head, int64_t dim,
                          const Indices& dims) {
  return rows.slice(0, head * dim, (head + 1) * dim)
      .index_select(0, at::tensor(dims));
}

TEST_P(RotatingIdentityTest,
       KeepingSomeRopePairsEqualsMaskingTheOtherPairsOfWholeKeys) {
  const int64_t dim = layer_.spec.head_dim;
  for (const bool fold : {false, true}) {
    for (const auto stored : {kvasir::v1::PRE_ROPE, kvasir::v1::POST_ROPE}) {
      Layer masked = layer_;
      Layer pruned = layer_;
      kvasir::v1::LayerPlan plan = FullPlan(layer_);
      kvasir::v1::Part* part = OnlyPart(plan.mutable_key());
      part->set_stored(stored);
      auto* use = part->add_uses();
      fold ? (void)use->mutable_fold() : (void)use->mutable_at_runtime();
      at::Tensor mask = at::zeros({layer_.kv_dims()});
      const std::vector<std::string> names =
          layer_.spec.qkv_bias ? std::vector<std::string>{"weight", "bias"}
                               : std::vector<std::string>{"weight"};
      for (int64_t h = 0; h < layer_.spec.num_kv_heads; ++h) {
        auto* list = part->mutable_rope_pairs()->add_per_head();
        for (const int64_t pair : KeptPairs(layer_, h)) {
          list->add_pair_indices(static_cast<uint32_t>(pair));
        }
        for (const int64_t d : RowsOfPairs(layer_, KeptPairs(layer_, h))) {
          mask[h * dim + d].fill_(1.0);
        }
      }
      for (const std::string& name : names) {
        const at::Tensor key = layer_["k_proj." + name];
        masked["k_proj." + name] =
            key * (name == "bias" ? mask : mask.unsqueeze(1));
        std::vector<at::Tensor> rows;
        for (int64_t h = 0; h < layer_.spec.num_kv_heads; ++h) {
          rows.push_back(SelectHeadRows(
              key, h, dim, RowsOfPairs(layer_, KeptPairs(layer_, h))));
        }
        pruned["k_proj." + name] = at::cat(rows);
        if (!fold) continue;
        rows.clear();
        for (int64_t i = 0; i < layer_.spec.num_heads; ++i) {
          rows.push_back(SelectHeadRows(
              layer_["q_proj." + name], i, dim,
              RowsOfPairs(layer_, KeptPairs(layer_, i / layer_.share()))));
        }
        pruned["q_proj." + name] = at::cat(rows);
      }
      ExpectSame(Attention(pruned, &plan), Attention(masked, nullptr));
    }
  }
}

// The result of AddCommuting. AddCommuting makes a rope_low_rank part with
// random factors in `layer`, and writes the rows of an ordinary key projection
// with the same result to `full`.
struct Commuting {
  std::vector<Indices> groups;
  std::vector<Indices> channel_pairs;
  std::vector<at::Tensor> up;  // [heads, 2, C]
};

Commuting AddCommuting(Layer& layer, Layer& full, kvasir::v1::Part& part,
                       const std::string& prefix, bool fold) {
  Commuting made;
  made.groups = Groups(layer, layer.spec.num_kv_heads > 2);
  const int64_t dim = layer.spec.head_dim;
  at::Tensor rows = full["k_proj.weight"].clone().view(
      {layer.spec.num_kv_heads, dim, kModelDim});
  at::Tensor biases = at::zeros({layer.spec.num_kv_heads, dim});
  std::vector<at::Tensor> downs;
  std::vector<at::Tensor> down_biases;
  for (size_t g = 0; g < made.groups.size(); ++g) {
    auto* group = part.mutable_rope_low_rank()->add_groups();
    Indices channel_pairs;
    // Groups differ: the second group leaves out the first pair, and ranks
    // alternate between 1 and 2.
    for (int64_t f = static_cast<int64_t>(g); f < layer.pairs(); ++f) {
      const int64_t rank = 1 + (f + static_cast<int64_t>(g)) % 2;
      group->add_pairs(static_cast<uint32_t>(f));
      group->add_rank_per_pair(static_cast<uint32_t>(rank));
      channel_pairs.insert(channel_pairs.end(), static_cast<size_t>(rank), f);
    }
    const auto complex = static_cast<int64_t>(channel_pairs.size());
    const auto heads = static_cast<int64_t>(made.groups[g].size());
    const at::Tensor up = Random({heads, 2, complex});
    const at::Tensor down = Random({2 * complex, kModelDim});
    const at::Tensor bias = Random({2 * complex});
    for (int64_t i = 0; i < heads; ++i) {
      const int64_t head = made.groups[g][static_cast<size_t>(i)];
      group->add_heads(static_cast<uint32_t>(head));
      for (int64_t f = 0; f < layer.pairs(); ++f) {
        rows[head][layer.PairDims(f).first].zero_();
        rows[head][layer.PairDims(f).second].zero_();
      }
      for (int64_t c = 0; c < complex; ++c) {
        const auto [a, b] =
            layer.PairDims(channel_pairs[static_cast<size_t>(c)]);
        const at::Tensor real = up[i][0][c];
        const at::Tensor imaginary = up[i][1][c];
        // Adds the real part (row a) and the imaginary part (row b) of the
        // product of lift and latent, which are complex numbers.
        rows[head][a] += real * down[c] - imaginary * down[complex + c];
        rows[head][b] += real * down[complex + c] + imaginary * down[c];
        biases[head][a] += real * bias[c] - imaginary * bias[complex + c];
        biases[head][b] += real * bias[complex + c] + imaginary * bias[c];
      }
    }
    if (!fold) layer[absl::StrCat(prefix, ".up.", g, ".weight")] = up;
    made.up.push_back(up);
    made.channel_pairs.push_back(channel_pairs);
    downs.push_back(down);
    down_biases.push_back(bias);
  }
  part.set_latent_bias(true);
  layer[prefix + ".down.weight"] = at::cat(downs);
  layer[prefix + ".down.bias"] = at::cat(down_biases);
  full["k_proj.weight"] = rows.view({-1, kModelDim});
  full["k_proj.bias"] = biases.flatten();
  if (!full.spec.qkv_bias) {
    full.spec.qkv_bias = true;
    full["q_proj.bias"] = at::zeros({full.query_dims()});
    full["v_proj.bias"] = at::zeros({full.kv_dims()});
  }
  auto* use = part.add_uses();
  fold ? (void)use->mutable_fold() : (void)use->mutable_at_runtime();
  return made;
}

// Returns the query rows [2C, ...] of one head that match folded keys. Each
// complex channel is conj(up) times the query.
at::Tensor FoldedQueryRows(const Layer& layer, const at::Tensor& head_rows,
                           const at::Tensor& up, const Indices& channel_pairs) {
  std::vector<at::Tensor> real;
  std::vector<at::Tensor> imaginary;
  for (size_t c = 0; c < channel_pairs.size(); ++c) {
    const auto [a, b] = layer.PairDims(channel_pairs[c]);
    const at::Tensor ur = up[0][static_cast<int64_t>(c)];
    const at::Tensor ui = up[1][static_cast<int64_t>(c)];
    real.push_back(ur * head_rows[a] + ui * head_rows[b]);
    imaginary.push_back(ur * head_rows[b] - ui * head_rows[a]);
  }
  real.insert(real.end(), imaginary.begin(), imaginary.end());
  return at::stack(real);
}

// Latents that are first rotated and then lifted give the same keys as latents
// that are first lifted and then rotated. The rotation comes first if latents
// are stored POST_ROPE, or if they are folded, because then they are multiplied
// by rotated queries.
TEST_P(RotatingIdentityTest,
       CommutingLatentsMayBeLiftedBeforeOrAfterTheRotation) {
  if (layer_.spec.rope.rotary_dim < layer_.spec.head_dim) {
    layer_["k_proj.weight"] = layer_["k_proj.weight"].clone();
    auto heads = layer_["k_proj.weight"].view(
        {layer_.spec.num_kv_heads, layer_.spec.head_dim, kModelDim});
    // The part does not cover the dims that do not rotate.
    heads.slice(1, layer_.spec.rope.rotary_dim).zero_();
  }
  for (const bool fold : {false, true}) {
    for (const auto stored : {kvasir::v1::PRE_ROPE, kvasir::v1::POST_ROPE}) {
      Layer full = layer_;
      Layer low = layer_;
      kvasir::v1::LayerPlan plan = FullPlan(layer_);
      kvasir::v1::Part* part = OnlyPart(plan.mutable_key());
      part->set_stored(stored);
      const Commuting made = AddCommuting(low, full, *part, "k_proj", fold);
      for (const char* name : {"weight", "bias"}) {
        if (!fold || layer_.tensors.count(
                         absl::StrCat("self_attn.q_proj.", name)) == 0) {
          continue;
        }
        std::vector<at::Tensor> rows;
        for (int64_t i = 0; i < layer_.spec.num_heads; ++i) {
          for (size_t g = 0; g < made.groups.size(); ++g) {
            for (size_t j = 0; j < made.groups[g].size(); ++j) {
              if (made.groups[g][j] != i / layer_.share()) continue;
              const int64_t d = layer_.spec.head_dim;
              rows.push_back(FoldedQueryRows(
                  layer_,
                  layer_[absl::StrCat("q_proj.", name)].slice(0, i * d,
                                                              (i + 1) * d),
                  made.up[g][static_cast<int64_t>(j)], made.channel_pairs[g]));
            }
          }
        }
        low[absl::StrCat("q_proj.", name)] = at::cat(rows);
      }
      ExpectSame(Attention(low, &plan), Attention(full, nullptr));
      if (stored != kvasir::v1::PRE_ROPE) continue;
      kvasir::v1::LayerPlan whole = FullPlan(layer_);
      whole.mutable_key()->mutable_parts(0)->set_stored(kvasir::v1::PRE_ROPE);
      for (kvasir::v1::LayerPlan* rolls : {&plan, &whole}) {
        *rolls->mutable_eviction() = Rolling(layer_, /*together=*/true);
      }
      ExpectSame(Attention(low, &plan), Attention(full, &whole));
    }
  }
}

// Records the positions that a unit keeps at each length.
class KeptRecorder : public LayerObserver {
 public:
  void OnQuery(int64_t, const at::Tensor& x) override { query = x; }
  void OnKey(int64_t, const at::Tensor& x) override { key = x; }
  void OnValue(int64_t, const at::Tensor& x) override { value = x; }
  void OnKept(int64_t, int64_t batch, int64_t unit, int64_t length,
              const Indices& positions) override {
    kept[{batch, unit, length}] = positions;
  }

  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  std::map<std::array<int64_t, 3>, Indices> kept;
};

// Compares with a computation token by token in float64. Each token sees the
// tokens that its unit holds. Keys and queries are rotated by their index among
// these tokens.
TEST_P(RotatingIdentityTest, RollingPositionsRotateKeysByTheIndexOfTheirSlot) {
  kvasir::v1::LayerPlan plan = FullPlan(layer_);
  plan.mutable_key()->mutable_parts(0)->set_stored(kvasir::v1::PRE_ROPE);
  *plan.mutable_eviction() = Rolling(layer_);
  KeptRecorder seen;
  const auto have = Attention(layer_, &plan, {.observer = &seen});
  KVASIR_ASSERT_OK(have);
  EXPECT_FALSE(seen.kept.empty());
  const model::DecoderSpec& spec = layer_.spec;
  const Rotation rotation =
      MakeRotation(spec.rope, kLength, at::TensorOptions().dtype(at::kDouble));
  const auto turned = [&](const at::Tensor& head, int64_t slot) {
    return Rotate(head.to(at::kDouble).view({1, 1, 1, -1}),
                  {rotation.cos.slice(0, slot, slot + 1).unsqueeze(1),
                   rotation.sin.slice(0, slot, slot + 1).unsqueeze(1),
                   spec.rope.pairing})
        .flatten();
  };
  at::Tensor mixed =
      at::zeros({2, kLength, spec.num_heads, spec.head_dim}, at::kDouble);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t head = 0; head < spec.num_kv_heads; ++head) {
      Indices held;
      for (int64_t t = 0; t < kLength; ++t) {
        // Each head evicts separately, so the index of a unit is that of its
        // head.
        const auto stayed = seen.kept.find({b, head, t});
        if (stayed != seen.kept.end()) held = stayed->second;
        held.push_back(t);
        const auto slots = static_cast<int64_t>(held.size());
        std::vector<at::Tensor> keys;
        std::vector<at::Tensor> values;
        for (int64_t s = 0; s < slots; ++s) {
          const int64_t p = held[static_cast<size_t>(s)];
          keys.push_back(turned(seen.key[b][p][head], s));
          values.push_back(seen.value[b][p][head].to(at::kDouble));
        }
        for (int64_t q = head * layer_.share(); q < (head + 1) * layer_.share();
             ++q) {
          const at::Tensor scores =
              at::mv(at::stack(keys), turned(seen.query[b][t][q], slots - 1));
          const at::Tensor weights = at::softmax(
              scores / std::sqrt(static_cast<double>(spec.head_dim)), 0);
          mixed[b][t][q].copy_(at::mv(at::stack(values).t(), weights));
        }
      }
    }
  }
  at::Tensor want =
      at::matmul(mixed.flatten(2), layer_["o_proj.weight"].to(at::kDouble).t());
  if (layer_.tensors.count("self_attn.o_proj.bias") > 0) {
    want = want + layer_["o_proj.bias"];
  }
  ExpectSame(have->to(at::kDouble), want);
}

// Keys have two parts: rope_low_rank for dims that rotate, and low_rank (folded
// or applied at run time) for the other dims.
TEST_P(PartialRotaryIdentityTest,
       ScoresOfTheRotatedAndUnrotatedPartsOfAHeadAreAdded) {
  const int64_t rest = layer_.spec.head_dim - layer_.spec.rope.rotary_dim;
  ASSERT_GT(rest, 0);
  const int64_t dim = layer_.spec.head_dim;
  for (const bool fold : {false, true}) {
    Layer full = layer_;
    Layer low = layer_;
    kvasir::v1::LayerPlan plan = FullPlan(layer_);
    kvasir::v1::Part* first = OnlyPart(plan.mutable_key());
    first->set_stored(kvasir::v1::POST_ROPE);
    AddCommuting(low, full, *first, "k_proj.part0", false);
    kvasir::v1::Part* second = plan.mutable_key()->add_parts();
    second->mutable_codec()->set_dtype(kvasir::v1::F32);
    second->set_stored(kvasir::v1::NO_ROPE);
    const LowRank made =
        AddLowRank(low, *second, "k_proj.part1", rest, true, fold);
    if (!fold) second->mutable_uses(0)->mutable_at_runtime();
    full["k_proj.weight"]
        .view({layer_.spec.num_kv_heads, dim, kModelDim})
        .slice(1, layer_.spec.rope.rotary_dim)
        .copy_(made.rows);
    full["k_proj.bias"]
        .view({layer_.spec.num_kv_heads, dim})
        .slice(1, layer_.spec.rope.rotary_dim)
        .copy_(made.bias);
    for (const char* name : {"weight", "bias"}) {
      if (!fold || !low["q_proj.weight"].defined() ||
          layer_.tensors.count(absl::StrCat("self_attn.q_proj.", name)) == 0) {
        continue;
      }
      // The rows of each query head: first the unchanged rows of its group's
      // RoPE pairs, then the folded rows of the other dims.
      std::vector<at::Tensor> rows;
      for (int64_t i = 0; i < layer_.spec.num_heads; ++i) {
        const auto head = static_cast<size_t>(i / layer_.share());
        const at::Tensor own = layer_[absl::StrCat("q_proj.", name)].slice(
            0, i * dim, (i + 1) * dim);
        Indices pairs;
        for (const auto& group : plan.key().parts(0).rope_low_rank().groups()) {
          for (const uint32_t h : group.heads()) {
            if (h != head) continue;
            pairs.assign(group.pairs().begin(), group.pairs().end());
          }
        }
        rows.push_back(
            own.index_select(0, at::tensor(RowsOfPairs(layer_, pairs))));
        const at::Tensor& up =
            made.up[static_cast<size_t>(made.group_of_head[head])];
        const int64_t place = made.place_in_group[head];
        rows.push_back(
            at::matmul(up.slice(0, place * rest, (place + 1) * rest).t(),
                       own.slice(0, layer_.spec.rope.rotary_dim)));
      }
      low[absl::StrCat("q_proj.", name)] = at::cat(rows);
    }
    ExpectSame(Attention(low, &plan), Attention(full, nullptr));
  }
}

// An orthonormal basis of all channels must not change the result. A basis with
// fewer channels must give the result of projected keys and values.
TEST_P(IdentityTest, AStaticBasisProjectsKeysAndValuesOnItsRows) {
  at::Tensor basis = std::get<0>(
      at::linalg_qr(at::randn({layer_.kv_dims(), layer_.kv_dims()})));
  const bool cut = layer_.kv_dims() % 8 == 0;
  for (const bool post : {false, true}) {
    if (post && layer_.pairs() == 0) continue;
    Layer full = layer_;
    Layer low = layer_;
    kvasir::v1::LayerPlan plan = FullPlan(layer_);
    kvasir::v1::Part* part = plan.mutable_key()->mutable_parts(0);
    part->mutable_codec()->mutable_basis_static();
    part->set_mean(true);
    if (layer_.pairs() > 0 && !post) part->set_stored(kvasir::v1::PRE_ROPE);
    low["k_proj.basis.weight"] = basis;
    low["k_proj.basis.mean"] = Random({layer_.kv_dims()});
    ExpectSame(Attention(low, &plan), Attention(full, nullptr));
    if (!cut || post) continue;
    // A quarter of the channels has no bits and is left out. The other channels
    // have 8 bits, which are nearly exact here; without codes (code_latents =
    // false) the result is exactly the projection.
    auto* bits = part->mutable_codec()->mutable_bits();
    for (const uint32_t b : {8, 8, 8, 8, 8, 8, 0, 0}) bits->add_schedule(b);
    part->mutable_codec()->mutable_per_token();
    part->mutable_codec()->set_param_dtype(kvasir::v1::F16);
    const at::Tensor kept = basis.slice(0, 0, layer_.kv_dims() * 3 / 4);
    low["k_proj.basis.weight"] = kept;
    const at::Tensor projection = at::matmul(kept.t(), kept);
    const at::Tensor mean = low["k_proj.basis.mean"];
    full["k_proj.weight"] = at::matmul(projection, full["k_proj.weight"]);
    const at::Tensor bias = layer_.spec.qkv_bias
                                ? layer_["k_proj.bias"]
                                : at::zeros({layer_.kv_dims()});
    full["k_proj.bias"] = at::mv(projection, bias - mean) + mean;
    if (!layer_.spec.qkv_bias) {
      full.spec.qkv_bias = true;
      full["q_proj.bias"] = at::zeros({layer_.query_dims()});
      full["v_proj.bias"] = at::zeros({layer_.kv_dims()});
    }
    ExpectSame(Attention(low, &plan, {.code_latents = false}),
               Attention(full, nullptr));
  }
}

// A CacheTransform that codes keys and values like a plan with POST_ROPE keys.
class CodedCache : public CacheTransform {
 public:
  // `left_out` is the part of keys that is not coded.
  CodedCache(const LatentCodec& codec, int64_t sinks, int64_t window,
             at::Tensor left_out)
      : codec_(codec),
        sinks_(sinks),
        window_(window),
        left_out_(std::move(left_out)) {}
  absl::StatusOr<Seen> RotatedKey(int64_t, const at::Tensor& key,
                                  const at::Tensor&) const override {
    auto seen = Coded(key - left_out_);
    if (seen.ok()) seen->values = seen->values + left_out_;
    return seen;
  }
  absl::StatusOr<Seen> Value(int64_t, const at::Tensor& value) const override {
    return Coded(value);
  }

 private:
  absl::StatusOr<Seen> Coded(const at::Tensor& heads) const {
    auto coded = CodeLatent(codec_, heads);
    if (!coded.ok()) return coded.status();
    return Seen{WithSinks(coded->values, heads, sinks_), window_};
  }
  LatentCodec codec_;
  int64_t sinks_;
  int64_t window_;
  at::Tensor left_out_;
};

// Returns what is left out of the layer's rotated keys, [T, Hkv, D].
at::Tensor KeyBiasLeftOut(const Layer& layer) {
  const auto bias = layer.tensors.find("self_attn.k_proj.bias");
  if (bias == layer.tensors.end()) return at::zeros({1, 1, 1});
  if (layer.pairs() == 0) {
    return bias->second.view({1, layer.spec.num_kv_heads, -1});
  }
  return BiasOutsideOfCodes(layer.spec.rope, bias->second,
                            layer.spec.num_kv_heads, kLength);
}

TEST_P(IdentityTest, AttentionSeesDecodedKeysAndValuesExceptForExactTokens) {
  for (const auto& [sinks, window] : std::vector<std::pair<int, int>>{
           {0, 0}, {0, 3}, {2, 0}, {2, 3}, {3, kLength - 2}}) {
    kvasir::v1::LayerPlan plan = FullPlan(layer_);
    for (auto* side : {plan.mutable_key(), plan.mutable_value()}) {
      kvasir::v1::Codec* codec = side->mutable_parts(0)->mutable_codec();
      codec->mutable_bits()->add_schedule(3);
      codec->mutable_per_token();
      codec->set_param_dtype(kvasir::v1::F16);
      side->set_exact_window(static_cast<uint32_t>(window));
    }
    plan.set_exact_sinks(static_cast<uint32_t>(sinks));
    const auto codec =
        MakeLatentCodec(plan.key().parts(0).codec(), layer_.spec.head_dim);
    KVASIR_ASSERT_OK(codec);
    const CodedCache cache(*codec, sinks, window, KeyBiasLeftOut(layer_));
    const auto have = Attention(layer_, &plan);
    // The tolerance is larger if there are exact tokens, because the transform
    // does not round their rows to bf16.
    ExpectSame(have, Attention(layer_, nullptr, {.transform = &cache}),
               sinks + window == 0 ? 2e-5 : 1e-2);
    // If some tokens are coded, the result must differ from the result without
    // codes.
    if (sinks + window >= kLength) continue;
    const auto exact = Attention(layer_, nullptr);
    EXPECT_GT((*have - *exact).abs().max().item<double>(), 1e-3);
  }
}

// If at most four pairs have a bias, codes leave it out completely. So a large
// bias must not make the error of coded keys much larger.
TEST_P(IdentityTest, AKeyBiasInAtMostFourPairsHardlyChangesTheErrorOfCodes) {
  for (const auto stored : {kvasir::v1::POST_ROPE, kvasir::v1::PRE_ROPE}) {
    Layer plain = layer_;
    plain.spec.qkv_bias = true;
    plain["q_proj.bias"] = at::zeros({layer_.query_dims()});
    plain["k_proj.bias"] = at::zeros({layer_.kv_dims()});
    plain["v_proj.bias"] = at::zeros({layer_.kv_dims()});
    kvasir::v1::LayerPlan plan = FullPlan(plain);
    if (plain.pairs() > 0)
      plan.mutable_key()->mutable_parts(0)->set_stored(stored);
    kvasir::v1::Codec* codec =
        plan.mutable_key()->mutable_parts(0)->mutable_codec();
    codec->mutable_bits()->add_schedule(4);
    codec->mutable_per_token();
    codec->set_param_dtype(kvasir::v1::F16);
    const at::Tensor lost =
        *Attention(plain, &plan) - *Attention(plain, nullptr);
    Layer biased = plain;
    at::Tensor bias =
        3 * at::ones({plain.spec.num_kv_heads, plain.spec.head_dim});
    for (int64_t pair = 4; pair < plain.pairs(); ++pair) {
      const auto [first, second] = plain.PairDims(pair);
      bias.select(1, first).zero_();
      bias.select(1, second).zero_();
    }
    biased["k_proj.bias"] = bias.flatten();
    const at::Tensor own =
        *Attention(biased, &plan) - *Attention(biased, nullptr);
    EXPECT_GT(lost.norm().item<double>(), 1e-4);
    EXPECT_LT(own.norm().item<double>(), 2.5 * lost.norm().item<double>());
  }
}

TEST(KeyBiasTest, TheBiasOfSlowPairsAndOfTheFourLargestPairsIsLeftOut) {
  model::RopeSpec rope;
  rope.rotary_dim = 14;
  rope.frequencies = {1.0, 0.5, 0.1, 0.02, 0.01, 0.003, 0.001};
  rope.attention_factor = 1.5;
  // Pairs 1 to 4 would leave the most in the codes, so their biases are left
  // out exactly. Pairs 5 and 6 turn slowly, so their biases are left out as at
  // the centre of the tile. The bias of pair 0 remains.
  const std::vector<double> lengths = {0.5, 9, 8, 7, 6, 20, 30};
  for (const auto pairing :
       {model::RopePairing::kHalfSplit, model::RopePairing::kInterleaved}) {
    rope.pairing = pairing;
    const bool halves = pairing == model::RopePairing::kHalfSplit;
    std::vector<double> bias(16, 0.25);
    const auto first = [&](size_t p) { return halves ? p : 2 * p; };
    const auto second = [&](size_t p) { return halves ? p + 7 : 2 * p + 1; };
    for (size_t p = 0; p < 7; ++p) bias[first(p)] = lengths[p];
    for (size_t p = 0; p < 7; ++p) bias[second(p)] = 0;
    const at::Tensor out =
        BiasOutsideOfCodes(rope, at::tensor(bias, at::kDouble), 1, 150);
    ASSERT_EQ(out.sizes(), (c10::IntArrayRef{150, 1, 16}));
    for (const int64_t n : {0, 31, 63, 64, 149}) {
      const auto at_dim = [&](size_t dim) {
        return out[n][0][static_cast<int64_t>(dim)].item<double>();
      };
      for (size_t p = 0; p < 7; ++p) {
        const auto position =
            static_cast<double>(p <= 4 ? n : n / 64 * 64 + 32);
        const double length = p == 0 ? 0 : 1.5 * lengths[p];
        const double angle = position * rope.frequencies[p];
        EXPECT_NEAR(at_dim(first(p)), length * std::cos(angle), 1e-9) << p;
        EXPECT_NEAR(at_dim(second(p)), length * std::sin(angle), 1e-9) << p;
      }
      EXPECT_EQ(at_dim(15), 0.25);
    }
  }
}

// If the window or the sinks cover all tokens, nothing is coded. Only the type
// of exact rows and the Hadamard transform before the codec then have an
// effect.
TEST_P(IdentityTest, ExactTokensAreStoredAsNumbersRoundedToBf16) {
  // Codes and their exact rows leave out a key bias, but keys of a plan without
  // codes include it. The two can be compared only without a bias.
  if (layer_.spec.qkv_bias) {
    layer_["k_proj.bias"] = at::zeros({layer_.kv_dims()});
  }
  for (const auto& [sinks, hadamard] : std::vector<std::pair<uint32_t, bool>>{
           {0u, false}, {0u, true}, {kLength, false}, {kLength + 9u, true}}) {
    kvasir::v1::LayerPlan coded = FullPlan(layer_);
    kvasir::v1::LayerPlan rounded = coded;
    coded.set_exact_sinks(sinks);
    for (auto* side : {coded.mutable_key(), coded.mutable_value()}) {
      kvasir::v1::Codec* codec = side->mutable_parts(0)->mutable_codec();
      codec->mutable_bits()->add_schedule(1);
      codec->mutable_per_token();
      codec->set_param_dtype(kvasir::v1::F16);
      if (hadamard) codec->mutable_hadamard_online();
      if (sinks == 0) side->set_exact_window(kLength);
    }
    for (auto* side : {rounded.mutable_key(), rounded.mutable_value()}) {
      kvasir::v1::Codec* codec = side->mutable_parts(0)->mutable_codec();
      codec->set_dtype(kvasir::v1::BF16);
      if (hadamard) codec->mutable_hadamard_online();
    }
    ExpectSame(Attention(layer_, &coded), Attention(layer_, &rounded));
  }
}

// Records the tensors that an observer sees, their order and all codes.
class Recorder : public LayerObserver {
 public:
  void OnAttentionInput(int64_t, const at::Tensor& x) override { input = x; }
  void OnQuery(int64_t, const at::Tensor& tensor) override { query = tensor; }
  void OnKey(int64_t, const at::Tensor& tensor) override { key = tensor; }
  void OnRotatedKey(int64_t, const at::Tensor& tensor) override {
    rotated = tensor;
    ++rotated_keys;
  }
  void OnValue(int64_t, const at::Tensor& tensor) override { value = tensor; }
  void OnLatent(int64_t, plan::Side side, int, const at::Tensor& h) override {
    if (side == plan::Side::kKey) latent = h;
  }
  bool WantsCodes() const override { return true; }
  void OnCodes(int64_t, plan::Side side, int, int64_t index,
               const CodedLatent& coded) override {
    if (side == plan::Side::kKey && index == 0) codes = coded.codes;
  }
  at::Tensor input, query, key, rotated, value, latent, codes;
  int rotated_keys = 0;
};

TEST_P(IdentityTest, TheObserverIsCalledForEveryStep) {
  kvasir::v1::LayerPlan plan = FullPlan(layer_);
  kvasir::v1::Codec* codec =
      plan.mutable_key()->mutable_parts(0)->mutable_codec();
  codec->mutable_bits()->add_schedule(4);
  codec->mutable_per_token();
  codec->set_param_dtype(kvasir::v1::F16);
  Recorder seen;
  KVASIR_ASSERT_OK(Attention(layer_, &plan, {.observer = &seen}));
  EXPECT_TRUE(at::equal(seen.input, layer_.x));
  EXPECT_EQ(seen.query.sizes(),
            c10::IntArrayRef(
                {2, kLength, layer_.spec.num_heads, layer_.spec.head_dim}));
  EXPECT_EQ(seen.latent.sizes(),
            c10::IntArrayRef({2, kLength, layer_.kv_dims()}));
  EXPECT_EQ(seen.codes.sizes(),
            c10::IntArrayRef({2, kLength, layer_.spec.head_dim}));
  EXPECT_GT(seen.codes.max().item<int>(), 8);
  // The cache holds keys after their rotation, so keys before it are not
  // reported.
  EXPECT_EQ(seen.key.defined(), layer_.pairs() == 0);
  const at::Tensor coded =
      seen.rotated.flatten(2) - KeyBiasLeftOut(layer_).flatten(1);
  EXPECT_LT((coded - seen.latent).abs().max().item<double>(), 0.4);
  EXPECT_TRUE(seen.value.defined());
  // Keys are reported only once, as they are stored, even if some tokens are
  // kept exact.
  plan.mutable_key()->set_exact_window(3);
  plan.set_exact_sinks(2);
  Recorder windowed;
  KVASIR_ASSERT_OK(Attention(layer_, &plan, {.observer = &windowed}));
  EXPECT_EQ(windowed.rotated_keys, 1);
  EXPECT_TRUE(at::equal(windowed.rotated, seen.rotated));
}

TEST_P(IdentityTest, TheObserverSeesTheLatentsThatAreCoded) {
  kvasir::v1::LayerPlan plan = FullPlan(layer_);
  Recorder attended;
  KVASIR_ASSERT_OK(Attention(layer_, &plan, {.observer = &attended}));
  Recorder observed;
  KVASIR_ASSERT_OK_AND_ASSIGN(const at::Tensor nothing,
                              Attention(layer_, &plan,
                                        {.observer = &observed,
                                         .code_latents = false,
                                         .only_latents = true}));
  EXPECT_FALSE(nothing.defined());
  EXPECT_TRUE(at::equal(observed.latent, attended.latent));
}

std::vector<Shape> ShapesWhere(bool (*suits)(const Shape&)) {
  std::vector<Shape> shapes;
  std::copy_if(std::begin(kShapes), std::end(kShapes),
               std::back_inserter(shapes), suits);
  return shapes;
}
std::string NameOf(const testing::TestParamInfo<Shape>& test) {
  std::string name = test.param.name;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Shapes, IdentityTest, testing::ValuesIn(kShapes),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Shapes, RotatingIdentityTest,
                         testing::ValuesIn(ShapesWhere([](const Shape& shape) {
                           return shape.rope;
                         })),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Shapes, PartialRotaryIdentityTest,
                         testing::ValuesIn(ShapesWhere([](const Shape& shape) {
                           return shape.rope &&
                                  shape.rotary_dim < shape.head_dim;
                         })),
                         NameOf);

TEST(LayerForwardTest, GradientsReachEveryFactor) {
  Layer layer = MakeLayer(kShapes[1]);
  kvasir::v1::LayerPlan plan = FullPlan(layer);
  kvasir::v1::Part* part = OnlyPart(plan.mutable_value());
  AddLowRank(layer, *part, "v_proj", layer.spec.head_dim, true, false);
  part->mutable_uses(0)->mutable_at_runtime();
  part->mutable_codec()->clear_dtype();
  part->mutable_codec()->mutable_bits()->add_schedule(4);
  part->mutable_codec()->mutable_per_token();
  part->mutable_codec()->set_param_dtype(kvasir::v1::F16);
  layer["o_proj.bias"] = Random({kModelDim});
  for (const char* name : {"v_proj.down.weight", "v_proj.up.1.weight",
                           "k_proj.weight", "q_proj.bias"}) {
    layer[name].requires_grad_(true);
  }
  const auto out = Attention(layer, &plan);
  KVASIR_ASSERT_OK(out);
  out->square().sum().backward();
  for (const char* name : {"v_proj.down.weight", "v_proj.up.1.weight",
                           "k_proj.weight", "q_proj.bias"}) {
    EXPECT_GT(layer[name].grad().abs().max().item<double>(), 0.0) << name;
  }
}

TEST(LayerForwardTest, UnsupportedFeaturesAreRefusedByName) {
  const Layer layer = MakeLayer(kShapes[0]);
  kvasir::v1::LayerPlan plan = FullPlan(layer);
  plan.mutable_selection();
  EXPECT_THAT(MakeLayerProgram(layer.spec, &plan, 0).status(),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("layer 0: the reference decoder does not "
                                 "support selection")));
  plan.clear_selection();
  kvasir::v1::Codec* codec =
      plan.mutable_key()->mutable_parts(0)->mutable_codec();
  codec->mutable_basis_sequence();
  EXPECT_THAT(MakeLayerProgram(layer.spec, &plan, 0).status(),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("layer 0 key part 0: ")));
}

TEST(LayerForwardTest, AMissingTensorOrAWrongShapeIsAnErrorThatNamesTheTensor) {
  Layer layer = MakeLayer(kShapes[1]);
  const auto program = MakeLayerProgram(layer.spec, nullptr, 0);
  KVASIR_ASSERT_OK(program);
  EXPECT_THAT(CheckLayerTensors(*program, layer.tensors),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("there is no tensor input_layernorm.weight")));
  for (const model::RequiredTensor& want : LayerTensors(*program)) {
    layer.tensors[want.name] = at::zeros(want.shape);
  }
  KVASIR_EXPECT_OK(CheckLayerTensors(*program, layer.tensors));
  layer["k_proj.bias"] = at::zeros({3});
  EXPECT_THAT(
      CheckLayerTensors(*program, layer.tensors),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("k_proj.bias must have the shape [32], has [3]")));
}

}  // namespace
}  // namespace kvasir::compress
