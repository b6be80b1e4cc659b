#include "compress/oracle/layer_forward.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/oracle/attention_core.h"
#include "compress/oracle/code_errors.h"
#include "compress/oracle/key_bias.h"
#include "compress/oracle/mlp_forward.h"
#include "compress/oracle/move_heads.h"
#include "compress/oracle/outer_forward.h"

namespace kvasir::compress {
namespace {

// Data shared by the functions of one AttentionForward call.
struct Call {
  const LayerProgram& program;
  const TensorMap& tensors;
  Rotation rotation;  // for the positions of this call
  LayerHooks hooks;
  CodeErrors* errors = nullptr;  // null if no tokens are evicted

  const model::DecoderSpec& spec() const { return program.spec; }

  absl::StatusOr<at::Tensor> Get(const std::string& name) const {
    const auto it = tensors.find(name);
    if (it == tensors.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", program.layer, ": there is no tensor ", name));
    }
    return it->second;
  }
  // Returns the tensor, or an undefined tensor if there is none of this name.
  at::Tensor Find(const std::string& name) const {
    const auto it = tensors.find(name);
    return it == tensors.end() ? at::Tensor() : it->second;
  }

  absl::StatusOr<at::Tensor> Project(const std::string& prefix,
                                     const at::Tensor& x, bool has_bias) const {
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor weight, Get(prefix + ".weight"));
    if (!has_bias) return at::linear(x, weight);
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor bias, Get(prefix + ".bias"));
    return at::linear(x, weight, bias);
  }
};

// Returns Rotate's arguments for whole heads.
Turn HeadTurn(const Call& call, double scale = 1.0) {
  return {call.rotation.cos.unsqueeze(1), call.rotation.sin.unsqueeze(1),
          call.spec().rope.pairing, scale};
}

// Returns Rotate's arguments for the given pairs [H * n] of each head.
Turn PairTurn(const Call& call, const at::Tensor& pairs, int64_t heads,
              model::RopePairing pairing, double scale = 1.0) {
  const auto pair_table = [&](const at::Tensor& table) {
    return table.index_select(1, pairs).view({table.size(0), heads, -1});
  };
  return {pair_table(call.rotation.cos), pair_table(call.rotation.sin), pairing,
          scale};
}

// Appends a channel of zeros to x [..., C] and selects channels by `index`.
at::Tensor SelectOrZero(const at::Tensor& x, const at::Tensor& index) {
  return at::constant_pad_nd(x, {0, 1}).index_select(-1, index);
}

// Rotates the complex channels of a rope_low_rank part by RoPE.
at::Tensor RotateComplex(const Call& call, const ProgramPart& part,
                         const at::Tensor& latent) {
  const at::Tensor heads =
      latent.index_select(-1, part.complex_split).unsqueeze(2);
  const Turn turn =
      PairTurn(call, part.channel_pairs, 1, model::RopePairing::kHalfSplit);
  return Rotate(heads, turn).squeeze(2).index_select(-1, part.complex_join);
}

// Applies the norm of queries or keys to rows [B, T, H * D], if the model has
// one.
absl::StatusOr<at::Tensor> NormalizeHeads(const Call& call,
                                          const std::string& module,
                                          const at::Tensor& rows) {
  const model::DecoderSpec& spec = call.spec();
  if (spec.qk_norm == model::QkNorm::kNone) return rows;
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor weight,
                          call.Get(module + ".weight"));
  const at::Tensor heads =
      rows.view({rows.size(0), rows.size(1), -1, weight.size(0)});
  return Normalize(spec, heads, weight, at::Tensor()).flatten(2);
}

// Computes all latents of a part, [B, T, sum of R'], as they are before they
// are coded.
absl::StatusOr<at::Tensor> PartLatents(const Call& call, plan::Side side,
                                       const ProgramPart& part,
                                       const at::Tensor& x) {
  const bool down = part.space == plan::Space::kLowRank ||
                    part.space == plan::Space::kRopeLowRank;
  KVASIR_ASSIGN_OR_RETURN(
      at::Tensor latent,
      call.Project(down ? part.prefix + ".down" : part.prefix, x,
                   part.has_bias));
  if (side == plan::Side::kKey) {
    KVASIR_ASSIGN_OR_RETURN(latent,
                            NormalizeHeads(call, "self_attn.k_norm", latent));
  }
  const int64_t kv_heads = call.spec().num_kv_heads;
  const std::vector<int64_t> by_head = {x.size(0), x.size(1), kv_heads, -1};
  const std::vector<int64_t> flat = {x.size(0), x.size(1), -1};
  if (part.post_rope && call.program.rotates) {
    if (part.space == plan::Space::kFull) {
      latent = Rotate(latent.view(by_head), HeadTurn(call)).reshape(flat);
    } else if (part.space == plan::Space::kRopePairs) {
      latent =
          Rotate(latent.view(by_head), PairTurn(call, part.kept_pairs, kv_heads,
                                                call.spec().rope.pairing))
              .reshape(flat);
    } else {
      latent = RotateComplex(call, part, latent);
    }
  }
  if (!part.basis) return latent;
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor basis,
                          call.Get(part.prefix + ".basis.weight"));
  if (part.mean) {
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor mean,
                            call.Get(part.prefix + ".basis.mean"));
    latent = latent - mean;
  }
  return at::linear(latent, basis);
}

absl::Status Place(const Call& call, plan::Side side, const ProgramPart& part,
                   const absl::Status& status) {
  return absl::Status(
      status.code(),
      absl::StrCat("layer ", call.program.layer, " ", plan::SideName(side),
                   " part ", part.index, ": ", status.message()));
}

// Codes latent `index` of a part, [..., R']. If CodesAlike returns true,
// `latent` may hold all latents of the part, with index 0.
absl::StatusOr<at::Tensor> CodeOne(const Call& call, plan::Side side,
                                   const ProgramPart& part, int64_t index,
                                   const at::Tensor& latent) {
  const LatentCodec& codec = part.latents[static_cast<size_t>(index)].codec;
  CodeOptions options;
  options.keep_codes =
      call.hooks.observer != nullptr && call.hooks.observer->WantsCodes();
  StaticRange range;
  if (codec.channel_static) {
    const int64_t begin = part.latents[static_cast<size_t>(index)].offset;
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor minimum,
                            call.Get(part.prefix + ".range.min"));
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor scale,
                            call.Get(part.prefix + ".range.scale"));
    range.minimum = minimum.slice(0, begin, begin + codec.stored_width);
    range.scale = scale.slice(0, begin, begin + codec.stored_width);
    options.range = &range;
  }
  absl::StatusOr<CodedLatent> coded = CodeLatent(codec, latent, options);
  if (!coded.ok()) return Place(call, side, part, coded.status());
  if (options.keep_codes) {
    call.hooks.observer->OnCodes(call.program.layer, side, part.index, index,
                                 *coded);
  }
  if (codec.channel_static && call.hooks.clamp_count != nullptr) {
    call.hooks.clamp_count->codes += latent.numel();
    call.hooks.clamp_count->clamped += coded->num_clamped;
  }
  return coded->values;
}

// Returns whether all latents of the part can be coded in one call: if widths
// are equal, ranges are not static, and no observer wants each latent's codes.
bool CodesAlike(const Call& call, const ProgramPart& part) {
  const LatentCodec& first = part.latents[0].codec;
  if (first.channel_static) return false;
  if (call.hooks.observer != nullptr && call.hooks.observer->WantsCodes()) {
    return false;
  }
  for (const ProgramLatent& latent : part.latents) {
    if (latent.width() != first.stored_width) return false;
  }
  return true;
}

absl::StatusOr<at::Tensor> CodeLatents(const Call& call, plan::Side side,
                                       const ProgramPart& part,
                                       const at::Tensor& latent) {
  if (call.hooks.observer != nullptr) {
    call.hooks.observer->OnLatent(call.program.layer, side, part.index, latent);
  }
  if (!part.coded || !call.hooks.code_latents) return latent;
  const auto count = static_cast<int64_t>(part.latents.size());
  if (CodesAlike(call, part)) {
    KVASIR_ASSIGN_OR_RETURN(
        const at::Tensor coded,
        CodeOne(call, side, part, 0,
                latent.view({latent.size(0), latent.size(1), count, -1})));
    return coded.view_as(latent);
  }
  std::vector<at::Tensor> pieces;
  for (int64_t i = 0; i < count; ++i) {
    const ProgramLatent& one = part.latents[static_cast<size_t>(i)];
    KVASIR_ASSIGN_OR_RETURN(
        at::Tensor coded,
        CodeOne(call, side, part, i,
                latent.slice(-1, one.offset, one.offset + one.width())));
    pieces.push_back(std::move(coded));
  }
  return pieces.size() == 1 ? pieces[0] : at::cat(pieces, -1);
}

// Rounds latents to bf16 as in exact rows, after the codec's Hadamard transform
// (if any). Gradients pass as if nothing were rounded.
at::Tensor RoundExact(const Call& call, const ProgramPart& part,
                      const at::Tensor& latent) {
  if (!call.hooks.code_latents) return latent;
  std::vector<at::Tensor> pieces;
  for (const ProgramLatent& one : part.latents) {
    at::Tensor rows = latent.slice(-1, one.offset, one.offset + one.width())
                          .detach()
                          .to(at::kFloat);
    const bool turned = one.codec.hadamard.defined();
    const at::Tensor signs =
        turned ? one.codec.hadamard.to(rows.device()) : at::Tensor();
    if (turned) rows = at::matmul(rows, signs.transpose(0, 1));
    rows = rows.to(at::kBFloat16).to(at::kFloat);
    pieces.push_back(turned ? at::matmul(rows, signs) : rows);
  }
  const at::Tensor rounded = at::cat(pieces, -1).to(latent.scalar_type());
  if (!latent.requires_grad()) return rounded;
  return latent + (rounded - latent).detach();
}

void AddClamps(const Call& call, const CacheTransform::Seen& seen) {
  if (call.hooks.clamp_count == nullptr) return;
  call.hooks.clamp_count->codes += seen.codes;
  call.hooks.clamp_count->clamped += seen.clamped;
}

// Returns the lift of a rope_low_rank latent as a real matrix [heads *
// rotary_dim, 2 C], with rows in the model's order of dims.
at::Tensor ComplexLift(const Call& call, const ProgramLatent& latent,
                       const at::Tensor& up) {
  const at::Tensor real =
      up.select(1, 0).unsqueeze(1) * latent.pair_selector.to(up.scalar_type());
  const at::Tensor imaginary =
      up.select(1, 1).unsqueeze(1) * latent.pair_selector.to(up.scalar_type());
  const at::Tensor first = at::cat({real, -imaginary}, -1);  // [heads, n, 2C]
  const at::Tensor second = at::cat({imaginary, real}, -1);
  const at::Tensor rows =
      call.spec().rope.pairing == model::RopePairing::kHalfSplit
          ? at::cat({first, second}, 1)
          : at::stack({first, second}, 2);
  return rows.reshape({-1, 2 * latent.pair_selector.size(1)});
}

absl::StatusOr<at::Tensor> LiftGroups(const Call& call, const ProgramPart& part,
                                      const at::Tensor& latent) {
  std::vector<at::Tensor> lifted;
  for (size_t g = 0; g < part.latents.size(); ++g) {
    const ProgramLatent& one = part.latents[g];
    KVASIR_ASSIGN_OR_RETURN(
        const at::Tensor up,
        call.Get(absl::StrCat(
            part.prefix, ".",
            plan::LiftName(part.lift_prefix, static_cast<int64_t>(g)))));
    lifted.push_back(at::linear(
        latent.slice(-1, one.offset, one.offset + one.width()),
        part.space == plan::Space::kRopeLowRank ? ComplexLift(call, one, up)
                                                : up));
  }
  return lifted.size() == 1 ? lifted[0] : at::cat(lifted, -1);
}

// Lifts decoded latents [B, T, sum of R'] to the dims that the part covers, [B,
// T, Hkv, d], with heads ascending.
absl::StatusOr<at::Tensor> Lift(const Call& call, const ProgramPart& part,
                                const at::Tensor& latent) {
  at::Tensor flat = latent;
  if (part.basis) {
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor basis,
                            call.Get(part.prefix + ".basis.weight"));
    flat = at::matmul(latent, basis);
    if (part.mean) {
      KVASIR_ASSIGN_OR_RETURN(const at::Tensor mean,
                              call.Get(part.prefix + ".basis.mean"));
      flat = flat + mean;
    }
  } else if (part.space == plan::Space::kLowRank ||
             part.space == plan::Space::kRopeLowRank) {
    KVASIR_ASSIGN_OR_RETURN(flat, LiftGroups(call, part, latent));
  }
  at::Tensor heads =
      flat.view({flat.size(0), flat.size(1), call.spec().num_kv_heads, -1});
  if (part.head_order.defined()) {
    heads = heads.index_select(2, part.head_order);
  }
  if (part.has_up_bias) {
    KVASIR_ASSIGN_OR_RETURN(
        const at::Tensor bias,
        call.Get(absl::StrCat(part.prefix, ".", part.lift_prefix, ".bias")));
    heads = heads + bias.view({call.spec().num_kv_heads, -1});
  }
  return heads;
}

// Adds a part's dims [B, T, Hkv, d] to whole heads `sum`, which may be
// undefined. Two parts never cover the same dims.
at::Tensor AddDims(const Call& call, const ProgramPart& part,
                   const at::Tensor& sum, const at::Tensor& dims) {
  at::Tensor whole = dims;
  if (part.lifted_index.defined()) {
    std::vector<int64_t> shape = dims.sizes().vec();
    shape.back() = call.spec().head_dim;
    whole = at::zeros(shape, dims.options())
                .scatter(-1, part.lifted_index.expand(dims.sizes()), dims);
  }
  return sum.defined() ? sum + whole : whole;
}

// The latents of a part [B, T, sum of R'] as they are read from the cache.
struct ReadLatents {
  at::Tensor coded;
  at::Tensor exact;  // latents in exact rows; defined if tokens stay exact
};

struct Keys {
  at::Tensor seen;  // [B, T, Hkv, W]
  int64_t exact_window = 0;
  at::Tensor exact;         // defined if there are exact tokens
  ReadLatents last_latent;  // latents that joint values share
};

// Returns a folded part's latents per KV head, rotated if RoPE rotates them.
at::Tensor FoldedKey(const Call& call, const ProgramPart& part,
                     const at::Tensor& latent) {
  const at::Tensor turned = part.space == plan::Space::kRopeLowRank &&
                                    !part.post_rope && call.program.rotates
                                ? RotateComplex(call, part, latent)
                                : latent;
  return SelectOrZero(turned, part.folded_channels)
      .view({latent.size(0), latent.size(1), call.spec().num_kv_heads, -1});
}

// Makes the keys that queries are multiplied with. A key has the dims of a
// head, followed by the latents of parts whose lift is folded into q_proj.
absl::StatusOr<at::Tensor> AssembleKey(const Call& call,
                                       const std::vector<at::Tensor>& latents) {
  const LayerProgram& program = call.program;
  LayerObserver* observer = call.hooks.observer;
  at::Tensor before;  // whole keys before their rotation
  at::Tensor after;
  std::vector<at::Tensor> pieces;
  for (size_t p = 0; p < program.key.size(); ++p) {
    const ProgramPart& part = program.key[p];
    if (part.folds) {
      pieces.push_back(FoldedKey(call, part, latents[p]));
      continue;
    }
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor dims,
                            Lift(call, part, latents[p]));
    at::Tensor& sum = part.post_rope ? after : before;
    sum = AddDims(call, part, sum, dims);
  }
  if (before.defined()) {
    if (call.hooks.transform != nullptr) {
      KVASIR_ASSIGN_OR_RETURN(CacheTransform::Seen seen,
                              call.hooks.transform->Key(program.layer, before));
      AddClamps(call, seen);
      if (call.errors != nullptr) {
        call.errors->AddHeads(plan::Side::kKey, seen.values - before);
      }
      before = std::move(seen.values);
    }
    if (observer != nullptr) observer->OnKey(program.layer, before);
    if (program.rotates) before = Rotate(before, HeadTurn(call));
    after = after.defined() ? before + after : before;
  }
  if (after.defined()) {
    if (observer != nullptr) observer->OnRotatedKey(program.layer, after);
    pieces.insert(pieces.begin(), after);
  }
  return pieces.size() == 1 ? pieces[0] : at::cat(pieces, -1);
}

absl::StatusOr<ReadLatents> MakeLatents(const Call& call, plan::Side side,
                                        const ProgramPart& part,
                                        const at::Tensor& x) {
  KVASIR_ASSIGN_OR_RETURN(at::Tensor latent, PartLatents(call, side, part, x));
  at::Tensor left_out;
  if (part.leaves_bias_out) {
    KVASIR_ASSIGN_OR_RETURN(left_out, call.Get(part.prefix + ".bias"));
    left_out = BiasOutsideOfPart(call.program, part, left_out, x.size(1));
    latent = latent - left_out;
  }
  ReadLatents read;
  KVASIR_ASSIGN_OR_RETURN(read.coded, CodeLatents(call, side, part, latent));
  if (call.errors != nullptr && part.holds_codes()) {
    const at::Tensor lost = read.coded - latent;
    call.errors->AddLatents(side, part, lost);
    if (call.program.joint && &part == &call.program.key.back()) {
      call.errors->AddLatents(plan::Side::kValue, part, lost);
    }
  }
  if ((side == plan::Side::kKey ? call.program.key_exact
                                : call.program.value_exact)
          .any()) {
    read.exact = RoundExact(call, part, latent);
  }
  if (left_out.defined()) {
    read.coded = read.coded + left_out;
    if (read.exact.defined()) read.exact = read.exact + left_out;
  }
  return read;
}

absl::StatusOr<Keys> MakeKeys(const Call& call, const at::Tensor& x) {
  const LayerProgram& program = call.program;
  std::vector<at::Tensor> exact;
  std::vector<at::Tensor> coded;
  Keys keys;
  for (const ProgramPart& part : program.key) {
    KVASIR_ASSIGN_OR_RETURN(keys.last_latent,
                            MakeLatents(call, plan::Side::kKey, part, x));
    coded.push_back(keys.last_latent.coded);
    exact.push_back(keys.last_latent.exact);
  }
  KVASIR_ASSIGN_OR_RETURN(keys.seen, AssembleKey(call, coded));
  keys.exact_window = program.key_exact.window;
  if (program.key_exact.any()) {
    // The observer and `errors` have already received these keys in coded form.
    Call unseen = call;
    unseen.hooks.observer = nullptr;
    unseen.errors = nullptr;
    KVASIR_ASSIGN_OR_RETURN(keys.exact, AssembleKey(unseen, exact));
    keys.seen = WithSinks(keys.seen, keys.exact, program.key_exact.sinks);
  }
  return keys;
}

struct Values {
  at::Tensor seen;  // [B, T, Hkv, Wv]
  int64_t exact_window = 0;
  at::Tensor exact;
};

absl::StatusOr<at::Tensor> AssembleValue(const Call& call,
                                         const at::Tensor& latent) {
  const ProgramPart& part = call.program.value;
  if (!part.folds) return Lift(call, part, latent);
  return SelectOrZero(latent, part.folded_channels)
      .view({latent.size(0), latent.size(1), call.spec().num_kv_heads, -1});
}

absl::StatusOr<Values> MakeValues(const Call& call, const at::Tensor& x,
                                  const Keys& keys) {
  const LayerProgram& program = call.program;
  ReadLatents latent = keys.last_latent;
  if (!program.joint) {
    KVASIR_ASSIGN_OR_RETURN(
        latent, MakeLatents(call, plan::Side::kValue, program.value, x));
  }
  Values values;
  KVASIR_ASSIGN_OR_RETURN(values.seen, AssembleValue(call, latent.coded));
  values.exact_window = program.value_exact.window;
  if (program.value_exact.any()) {
    KVASIR_ASSIGN_OR_RETURN(values.exact, AssembleValue(call, latent.exact));
    values.seen =
        WithSinks(values.seen, values.exact, program.value_exact.sinks);
  }
  if (call.hooks.transform != nullptr) {
    KVASIR_ASSIGN_OR_RETURN(
        CacheTransform::Seen seen,
        call.hooks.transform->Value(program.layer, values.seen));
    AddClamps(call, seen);
    if (call.errors != nullptr) {
      call.errors->AddHeads(plan::Side::kValue, seen.values - values.seen);
    }
    values.exact = values.seen;
    values.exact_window = seen.exact_window;
    values.seen = std::move(seen.values);
  }
  if (call.hooks.observer != nullptr && !program.value.folds) {
    call.hooks.observer->OnValue(program.layer, values.seen);
  }
  return values;
}

// Returns queries [B, T, Hq, W] for AssembleKey's keys, rotated and scaled.
absl::StatusOr<at::Tensor> MakeQueries(const Call& call, const at::Tensor& x,
                                       double scale) {
  const LayerProgram& program = call.program;
  const model::DecoderSpec& spec = call.spec();
  KVASIR_ASSIGN_OR_RETURN(at::Tensor rows,
                          call.Project("self_attn.q_proj", x, spec.qkv_bias));
  KVASIR_ASSIGN_OR_RETURN(rows, NormalizeHeads(call, "self_attn.q_norm", rows));
  const std::vector<int64_t> by_head = {x.size(0), x.size(1), spec.num_heads,
                                        -1};
  std::vector<at::Tensor> pieces;
  if (program.has_plain_key) {
    const at::Tensor query =
        (program.query_is_folded ? SelectOrZero(rows, program.plain_query_rows)
                                 : rows)
            .view(by_head);
    if (call.hooks.observer != nullptr && !program.query_is_folded) {
      call.hooks.observer->OnQuery(program.layer, query);
    }
    pieces.push_back(program.rotates ? Rotate(query, HeadTurn(call, scale))
                                     : query * scale);
  }
  const int64_t share = spec.num_heads / spec.num_kv_heads;
  for (size_t p = 0; p < program.key.size(); ++p) {
    const ProgramPart& part = program.key[p];
    if (!part.folds) continue;
    const at::Tensor query =
        SelectOrZero(rows, program.folded_query_rows[p]).view(by_head);
    if (part.space != plan::Space::kRopeLowRank) {
      pieces.push_back(query * scale);
      continue;
    }
    Turn turn = PairTurn(call, part.head_channel_pairs, spec.num_kv_heads,
                         model::RopePairing::kHalfSplit, scale);
    turn.cos = turn.cos.repeat_interleave(share, 1);
    turn.sin = turn.sin.repeat_interleave(share, 1);
    pieces.push_back(Rotate(query, turn));
  }
  return pieces.size() == 1 ? pieces[0] : at::cat(pieces, -1);
}

// Applies the hooks' CacheTransform to the rotated keys.
absl::Status TransformRotatedKeys(const Call& call, const at::Tensor& query,
                                  Keys& keys) {
  if (call.program.key[0].coded) {
    return absl::InvalidArgumentError(
        "a cache transform can be applied only to an uncompressed model");
  }
  KVASIR_ASSIGN_OR_RETURN(
      CacheTransform::Seen seen,
      call.hooks.transform->RotatedKey(call.program.layer, keys.seen, query));
  AddClamps(call, seen);
  if (call.errors != nullptr) {
    call.errors->AddHeads(plan::Side::kKey, seen.values - keys.seen);
  }
  keys.exact = keys.seen;
  keys.exact_window = seen.exact_window;
  keys.seen = std::move(seen.values);
  return absl::OkStatus();
}

// Returns the eviction rule of the layer; empty if all tokens are kept.
std::optional<EvictionRule> EvictionOf(const Call& call) {
  const LayerProgram& program = call.program;
  if (call.hooks.eviction != nullptr) {
    return call.hooks.eviction->at(static_cast<size_t>(program.layer));
  }
  if (!program.eviction.has_value()) return std::nullopt;
  return EvictionRule{.layer = *program.eviction};
}

at::Tensor Evict(const Call& call, const AttentionInputs& inputs,
                 const EvictionRule& rule) {
  EvictionInputs eviction{.rule = &rule,
                          .key_error = call.errors->key(),
                          .value_error = call.errors->value()};
  eviction.move = [&call](const at::Tensor& heads,
                          const std::vector<int64_t>& unit,
                          const at::Tensor& from, const at::Tensor& to) {
    return MoveHeads(call.program, call.rotation, heads, unit, from, to);
  };
  if (LayerObserver* observer = call.hooks.observer) {
    eviction.on_kept = [&](int64_t batch, int64_t unit, int64_t length,
                           const std::vector<int64_t>& positions) {
      observer->OnKept(call.program.layer, batch, unit, length, positions);
    };
  }
  return EvictingAttention(inputs, eviction);
}

absl::StatusOr<at::Tensor> Attend(const Call& asked, const at::Tensor& x) {
  const LayerProgram& program = asked.program;
  const std::optional<EvictionRule> eviction = EvictionOf(asked);
  CodeErrors errors(program.spec.num_kv_heads);
  Call call = asked;
  if (eviction.has_value()) call.errors = &errors;
  if (call.hooks.observer != nullptr) {
    call.hooks.observer->OnAttentionInput(program.layer, x);
  }
  const double scale =
      call.spec().score_scale != 0
          ? call.spec().score_scale
          : 1.0 / std::sqrt(static_cast<double>(call.spec().head_dim));
  AttentionInputs inputs;
  KVASIR_ASSIGN_OR_RETURN(
      inputs.query,
      MakeQueries(call, x, call.hooks.transform == nullptr ? scale : 1.0));
  KVASIR_ASSIGN_OR_RETURN(Keys keys, MakeKeys(call, x));
  if (call.hooks.transform != nullptr) {
    KVASIR_RETURN_IF_ERROR(TransformRotatedKeys(call, inputs.query, keys));
    inputs.query = inputs.query * scale;
  }
  KVASIR_ASSIGN_OR_RETURN(Values values, MakeValues(call, x, keys));
  if (call.hooks.only_latents) return at::Tensor();
  inputs.key = std::move(keys.seen);
  inputs.near_key = std::move(keys.exact);
  inputs.near_key_tokens = keys.exact_window;
  inputs.value = std::move(values.seen);
  inputs.near_value = std::move(values.exact);
  inputs.near_value_tokens = values.exact_window;
  inputs.sliding_window = program.sliding_window;
  inputs.score_cap = call.spec().score_cap;
  at::Tensor mixed = (eviction.has_value() ? Evict(call, inputs, *eviction)
                                           : CausalAttention(inputs))
                         .flatten(2);
  if (program.output_columns.defined()) {
    mixed = mixed.index_select(-1, program.output_columns);
  }
  return call.Project("self_attn.o_proj", mixed, program.has_o_bias);
}

absl::StatusOr<at::Tensor> LayerNormalize(const Call& call,
                                          const std::string& module,
                                          const at::Tensor& hidden) {
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor weight,
                          call.Get(module + ".weight"));
  at::Tensor bias;
  if (call.spec().norm == model::NormKind::kLayerNorm) {
    KVASIR_ASSIGN_OR_RETURN(bias, call.Get(module + ".bias"));
  }
  return Normalize(call.spec(), hidden, weight, bias);
}

// Applies the norm before attention or MLP, if the model has such a norm.
absl::StatusOr<at::Tensor> Input(const Call& call, const std::string& module,
                                 const at::Tensor& hidden) {
  if (!call.spec().norm_inputs) return hidden;
  return LayerNormalize(call, module, hidden);
}

// Applies the norm after attention or MLP, if the model has such a norm.
absl::StatusOr<at::Tensor> Output(const Call& call, const std::string& module,
                                  const at::Tensor& out) {
  if (!call.spec().norm_outputs) return out;
  return LayerNormalize(call, module, out);
}

}  // namespace

absl::StatusOr<at::Tensor> AttentionInput(const LayerProgram& program,
                                          const TensorMap& tensors,
                                          const at::Tensor& hidden) {
  return Input({program, tensors, {}, {}}, "input_layernorm", hidden);
}

absl::StatusOr<at::Tensor> AttentionForward(const LayerProgram& program,
                                            const TensorMap& tensors,
                                            const Rotation& rotation,
                                            const at::Tensor& x,
                                            const LayerHooks& hooks) {
  return Attend(
      {program, tensors,
       rotation.cos.defined() ? rotation.Slice(x.size(1)) : rotation, hooks},
      x);
}

absl::StatusOr<at::Tensor> LayerForward(const LayerProgram& program,
                                        const TensorMap& tensors,
                                        const Rotation& rotation,
                                        const at::Tensor& hidden,
                                        const LayerHooks& hooks) {
  const Call call{
      program, tensors,
      rotation.cos.defined() ? rotation.Slice(hidden.size(1)) : rotation,
      hooks};
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor x,
                          Input(call, "input_layernorm", hidden));
  KVASIR_ASSIGN_OR_RETURN(at::Tensor attention, Attend(call, x));
  KVASIR_ASSIGN_OR_RETURN(attention,
                          Output(call, "self_attn.output_norm", attention));
  const at::Tensor between = hidden + attention;
  KVASIR_ASSIGN_OR_RETURN(
      const at::Tensor mlp_input,
      Input(call, "post_attention_layernorm",
            program.spec.parallel_residual ? hidden : between));
  KVASIR_ASSIGN_OR_RETURN(
      at::Tensor mlp,
      MlpForward(program.spec, program.layer, tensors, mlp_input));
  KVASIR_ASSIGN_OR_RETURN(mlp, Output(call, "mlp.output_norm", mlp));
  return between + mlp;
}

}  // namespace kvasir::compress
