// Rebuilds keys from latents (KeyRebuildArgs in paged_attention.h), a block of
// 64 slots at a time. Keys are stored transposed, so the numbers of
// neighbouring slots are adjacent. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_REBUILD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_REBUILD_INL_H_
#undef KVASIR_KERNELS_REBUILD_INL_H_
#else
#define KVASIR_KERNELS_REBUILD_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/attention/cpu/latent_tile-inl.h"
#include "kernels/attention/grid/attention_grid.h"
#include "kernels/linear/tile-inl.h"
#include "kernels/simd/simd-inl.h"
#include "kernels/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

// Computes c = a b, or c += a b if args.accumulate. `columns` is a multiple of
// kTileColumns. The register tiles of the topmost rows also prefetch the memory
// at args.ahead, each tile a part of it.
template <typename T>
void Multiply(TileArgs args, int64_t rows, int64_t columns) {
  const TileArgs start = args;
  for (int64_t row = 0; row < rows;) {
    const int64_t tiles = (rows - row + kTileRows - 1) / kTileRows;
    const auto height = static_cast<int>((rows - row) / tiles);
    for (int64_t column = 0; column < columns; column += kTileColumns) {
      args.a = start.a + row * start.a_stride;
      args.b = static_cast<const T*>(start.b) + column;
      args.c = start.c + row * start.c_stride + column;
      RunTile<T>(height, args);
      if (args.ahead != nullptr) args.ahead += args.ahead_step * args.depth;
    }
    args.ahead = nullptr;
    row += height;
  }
}

// Adds the contribution of a run of codes to a row [64] of scores or of rebuilt
// keys: `to` becomes fma(sum, minimum, fma(raw, scale, to)). `raw` is the sum
// of factor * code over the run's channels, and `sum` the sum of the factors.
// If `is_new`, the old content of `to` counts as 0.
HWY_INLINE void ApplyRange(const float* raw, const float* scale,
                           const float* minimum, float sum, bool is_new,
                           float* to) {
  const Vec sums = Broadcast(sum);
  for (int64_t s = 0; s < kBlock; s += kVecLanes) {
    const Vec old = is_new ? hn::Zero(kFloats) : LoadFloats(to + s);
    const Vec scaled = Fma(LoadFloats(raw + s), LoadFloats(scale + s), old);
    hn::StoreU(Fma(sums, LoadFloats(minimum + s), scaled), kFloats, to + s);
  }
}

HWY_INLINE void AddToRow(float number, float* row) {
  const Vec added = Broadcast(number);
  for (int64_t s = 0; s < kBlock; s += kVecLanes) {
    hn::StoreU(hn::Add(LoadFloats(row + s), added), kFloats, row + s);
  }
}

// A vector of 64-bit integers, stored as two vectors: the lower and the upper
// halves of the integers.
struct WordHalves {
  WordVec low;
  WordVec high;
};

// Returns the angles step * positions, in units of 2^-64 turns (modulo 2^64).
// May also be called with one position and several steps.
HWY_INLINE WordHalves TurnsAt(uint64_t step, const WordHalves& positions) {
  const WordVec step_low = hn::Set(kWords, static_cast<uint32_t>(step));
  const WordVec step_high = hn::Set(kWords, static_cast<uint32_t>(step >> 32));
  const WordVec rest = hn::Add(hn::Mul(step_high, positions.low),
                               hn::Mul(step_low, positions.high));
#if HWY_TARGET == HWY_SCALAR
  const uint64_t product = (step & 0xffffffffu) * hn::GetLane(positions.low);
  return {hn::Set(kWords, static_cast<uint32_t>(product)),
          hn::Add(rest, hn::Set(kWords, static_cast<uint32_t>(product >> 32)))};
#else
  const hn::Repartition<uint64_t, Words> d64;
  const auto even = hn::MulEven(step_low, positions.low);
  const auto odd = hn::MulEven(
      step_low,
      hn::BitCast(kWords, hn::ShiftRight<32>(hn::BitCast(d64, positions.low))));
  const WordVec low = hn::OddEven(hn::BitCast(kWords, hn::ShiftLeft<32>(odd)),
                                  hn::BitCast(kWords, even));
  const WordVec high = hn::OddEven(
      hn::BitCast(kWords, odd), hn::BitCast(kWords, hn::ShiftRight<32>(even)));
  return {low, hn::Add(high, rest)};
#endif
}

// The result of ReduceTurnsVec, the vector version of ReduceTurns
// (scalar_math.h).
struct ReducedAngles {
  WordVec quarter;
  Vec remainder;
};
HWY_INLINE ReducedAngles ReduceTurnsVec(const WordHalves& turns) {
  constexpr uint32_t kEighth = 1u << 29;
  const hn::RebindToSigned<Floats> d32;
  const WordVec quarter =
      hn::ShiftRight<30>(hn::Add(turns.high, hn::Set(kWords, kEighth)));
  const WordVec rest = hn::Sub(turns.high, hn::ShiftLeft<30>(quarter));
  // Rounds the remainder to its upper 32 bits.
  const WordVec top = hn::Add(rest, hn::ShiftRight<31>(turns.low));
  return {quarter, hn::Mul(hn::ConvertTo(kFloats, hn::BitCast(d32, top)),
                           Broadcast(trig_constants::kRadiansPerUnit))};
}

// Stores the cosines and sines of angles, times `factor`. An angle is
// `quarter` quarter turns plus `r` radians.
HWY_INLINE void CosSinVec(Vec r, WordVec quarter, float factor, float* cosine,
                          float* sine) {
  namespace c = trig_constants;
  const Vec z = hn::Mul(r, r);
  Vec s = Fma(Broadcast(c::kS3), z, Broadcast(c::kS2));
  s = Fma(s, z, Broadcast(c::kS1));
  s = Fma(hn::Mul(s, z), r, r);
  Vec k = Fma(Broadcast(c::kC3), z, Broadcast(c::kC2));
  k = Fma(k, z, Broadcast(c::kC1));
  k = Fma(hn::Mul(k, z), z, Fma(Broadcast(-0.5f), z, Broadcast(1.0f)));
  const WordVec one = hn::Set(kWords, 1u);
  const WordVec two = hn::Set(kWords, 2u);
  const auto odd =
      hn::RebindMask(kFloats, hn::Ne(hn::And(quarter, one), hn::Zero(kWords)));
  // The cosine is negative in quarters 1 and 2, the sine in 2 and 3.
  const WordVec cos_sign =
      hn::ShiftLeft<30>(hn::And(hn::Add(quarter, one), two));
  const WordVec sin_sign = hn::ShiftLeft<30>(hn::And(quarter, two));
  const Vec a = hn::IfThenElse(odd, s, k);
  const Vec b = hn::IfThenElse(odd, k, s);
  const Vec f = Broadcast(factor);
  hn::StoreU(hn::Mul(hn::Xor(a, hn::BitCast(kFloats, cos_sign)), f), kFloats,
             cosine);
  hn::StoreU(hn::Mul(hn::Xor(b, hn::BitCast(kFloats, sin_sign)), f), kFloats,
             sine);
}

// Rebuilds the keys of one block at a time.
// Threads: each object is used by one thread only.
class KeyRebuilder {
 public:
  KeyRebuilder(const AttentionGrid& grid, const AttentionSequence& sequence,
               float* scratch, BlockLoader* loader)
      : params_(grid.params()),
        grid_(grid),
        sequence_(sequence),
        loader_(*loader),
        keys_(scratch + grid.scratch().keys),
        raw_(scratch + grid.scratch().lift_raw),
        cosines_(scratch + grid.scratch().cosines),
        sines_(scratch + grid.scratch().sines),
        lift_sums_(scratch + grid.scratch().lift_sums) {}

  // Must be called before the first block. Computes the sums of `up` for a KV
  // head (SumLift) once for all blocks, if the scratch has room for them.
  void HoldSums(int64_t part_index, const HeadSpan& span) const {
    const AttentionGrid::KeyPart& part = grid_.key(part_index);
    if (part.lift_offset < 0) return;
    const LatentGroup& group = GroupOf(part_index, span);
    const int64_t runs = part.fixed_ranges ? 1 : group.num_runs;
    for (int64_t run = 0; run < runs; ++run) {
      SumLift(part_index, span, run, HeldSums(part_index, span.kv_head, run));
    }
  }

  void StartBlock() { angles_part_ = -1; }
  // set_holds(true) declares that all keys of the block are already rebuilt.
  // Rebuild then only returns them.
  void set_holds(bool holds) { holds_ = holds; }

  // Returns the keys of the block's slots for the span's KV head, [d, 64]. They
  // are valid until the next call for the same part.
  const float* Rebuild(int64_t part_index, const HeadSpan& span) {
    const KeyRebuildArgs& rebuild = *params_.keys[part_index].rebuild;
    key_ = keys_ + grid_.key(part_index).tile_offset;
    if (holds_) return key_;
    if (rebuild.up == nullptr) {
      CopyKey(part_index, span);
    } else if (!grid_.key(part_index).codes) {
      LiftNumbers(part_index, span);
    } else if (grid_.key(part_index).fixed_ranges) {
      LiftFixed(part_index, span);
    } else {
      LiftCodes(part_index, span);
    }
    if (rebuild.bias != nullptr) {
      const float* bias = rebuild.bias + span.kv_head * rebuild.dims;
      for (int64_t i = 0; i < rebuild.dims; ++i) {
        AddToRow(bias[i], key_ + i * kBlock);
      }
    }
    if (rebuild.num_pairs > 0) Turn(part_index, span.kv_head);
    return key_;
  }

 private:
  const LatentPartArgs& Latents(int64_t part_index) const {
    return params_.keys[part_index].latents;
  }
  const LatentGroup& GroupOf(int64_t part_index, const HeadSpan& span) const {
    return Latents(part_index).groups[span.group];
  }
  AttentionGrid::Chunks ChunksOf(int64_t part_index,
                                 const HeadSpan& span) const {
    return grid_.chunks(grid_.key(part_index).first_group, span.group);
  }
  float* HeldSums(int64_t part_index, int64_t kv_head, int64_t run) const {
    const AttentionGrid::KeyPart& part = grid_.key(part_index);
    const int64_t dims = params_.keys[part_index].rebuild->dims;
    return lift_sums_ + part.lift_offset +
           (kv_head * part.lift_runs + run) * dims;
  }
  const float* SumsOf(int64_t part_index, const HeadSpan& span,
                      int64_t run) const {
    if (grid_.key(part_index).lift_offset >= 0) {
      return HeldSums(part_index, span.kv_head, run);
    }
    float* sums = lift_sums_ + grid_.held_lift_sums();
    SumLift(part_index, span, run, sums);
    return sums;
  }

  // Computes the contribution of the codes' minima to each element of a key. If
  // minima are stored in slots, sums[i] is the sum of row i of `up` over a run;
  // the caller multiplies it by the run's minimum. If minima are static,
  // sums[i] is the dot product of row i and the minima.
  void SumLift(int64_t part_index, const HeadSpan& span, int64_t run,
               float* sums) const {
    const KeyRebuildArgs& rebuild = *params_.keys[part_index].rebuild;
    const LatentGroup& group = GroupOf(part_index, span);
    const float* up = rebuild.up[span.kv_head];
    const float* minima =
        grid_.key(part_index).fixed_ranges
            ? Latents(part_index).static_minimum + group.column
            : nullptr;
    const int64_t begin = minima != nullptr ? 0 : group.runs[run].begin;
    const int64_t end =
        minima != nullptr ? group.width : begin + group.runs[run].width;
    constexpr int64_t kStep = 64;
    HWY_ALIGN float columns[kStep * kVecLanes];
    for (int64_t row = 0; row < rebuild.dims; row += kVecLanes) {
      Vec sum = hn::Zero(kFloats);
      for (int64_t c = begin; c < end; c += kStep) {
        const char* rows[kVecLanes];
        for (int64_t lane = 0; lane < kVecLanes; ++lane) {
          const int64_t i = std::min(row + lane, rebuild.dims - 1);
          rows[lane] = reinterpret_cast<const char*>(up + i * group.width + c);
        }
        const int64_t width = std::min(kStep, end - c);
        TransposeRows<float>(rows, kVecLanes, width, columns);
        for (int64_t i = 0; i < width; ++i) {
          const Vec column = LoadFloats(columns + i * kVecLanes);
          sum = minima != nullptr ? Fma(column, Broadcast(minima[c + i]), sum)
                                  : hn::Add(sum, column);
        }
      }
      HWY_ALIGN float lanes[kVecLanes];
      hn::Store(sum, kFloats, lanes);
      for (int64_t i = row; i < std::min(row + kVecLanes, rebuild.dims); ++i) {
        sums[i] = lanes[i - row];
      }
    }
  }

  // Returns the arguments for multiplying the rows of `a` by the tile that was
  // loaded last.
  TileArgs ProductArgs(const float* a, int64_t a_stride, int64_t depth,
                       float* c, bool accumulate) const {
    TileArgs args = {};
    args.depth = depth;
    args.a = a;
    args.a_stride = a_stride;
    args.b = loader_.tile();
    args.b_stride = kBlock;
    args.c = c;
    args.c_stride = kBlock;
    args.accumulate = accumulate;
    return args;
  }

  void LiftNumbers(int64_t part_index, const HeadSpan& span) {
    const KeyRebuildArgs& rebuild = *params_.keys[part_index].rebuild;
    const LatentGroup& group = GroupOf(part_index, span);
    const float* up = rebuild.up[span.kv_head];
    const AttentionGrid::Chunks chunks = ChunksOf(part_index, span);
    for (const LatentChunk* chunk = chunks.begin; chunk != chunks.end;
         ++chunk) {
      loader_.LoadKeys(Latents(part_index), group, *chunk);
      Multiply<float>(ProductArgs(up + chunk->begin, group.width, chunk->width,
                                  key_, chunk->begin > 0),
                      rebuild.dims, kBlock);
    }
  }

  // The part of `up` that one register tile uses: up to kTileRows rows from
  // `row` on, and `width` columns of each.
  struct UpRows {
    int64_t row;
    int64_t column;
    int64_t width;
  };
  static HWY_INLINE void PrefetchRows(const KeyRebuildArgs& rebuild,
                                      const HeadSpan& span, const UpRows& rows,
                                      int64_t stride) {
    constexpr auto kStep =
        AheadLines::kLineBytes / static_cast<int64_t>(sizeof(float));
    const int64_t end = std::min<int64_t>(rows.row + kTileRows, rebuild.dims);
    for (int64_t r = rows.row; r < end; ++r) {
      const float* from = rebuild.up[span.kv_head] + r * stride + rows.column;
      for (int64_t i = 0; i < rows.width; i += kStep) {
        AskForLine(reinterpret_cast<const char*>(from + i));
      }
    }
  }

  void LiftFixed(int64_t part_index, const HeadSpan& span) {
    const KeyRebuildArgs& rebuild = *params_.keys[part_index].rebuild;
    const LatentGroup& group = GroupOf(part_index, span);
    const float* scale = Latents(part_index).static_scale + group.column;
    const AttentionGrid::Chunks chunks = ChunksOf(part_index, span);
    for (const LatentChunk* chunk = chunks.begin; chunk != chunks.end;
         ++chunk) {
      loader_.LoadKeys(Latents(part_index), group, *chunk);
      HWY_ALIGN float scaled[kTileRows * kChunkChannels];
      for (int64_t row = 0; row < rebuild.dims; row += kTileRows) {
        const int64_t rows = std::min<int64_t>(kTileRows, rebuild.dims - row);
        for (int64_t r = 0; r < rows; ++r) {
          const float* up =
              rebuild.up[span.kv_head] + (row + r) * group.width + chunk->begin;
          for (int64_t i = 0; i < chunk->width; ++i) {
            scaled[r * kChunkChannels + i] = up[i] * scale[chunk->begin + i];
          }
        }
        // For a wide group, `up` does not fit into the level-1 cache, so the
        // rows that are needed next are prefetched during these products.
        if (row + rows < rebuild.dims) {
          PrefetchRows(rebuild, span, {row + rows, chunk->begin, chunk->width},
                       group.width);
        } else if (chunk + 1 < chunks.end) {
          PrefetchRows(rebuild, span, {0, chunk[1].begin, chunk[1].width},
                       group.width);
        }
        Multiply<float>(ProductArgs(scaled, kChunkChannels, chunk->width,
                                    key_ + row * kBlock, chunk->begin > 0),
                        rows, kBlock);
      }
    }
    const float* sums = SumsOf(part_index, span, 0);
    for (int64_t i = 0; i < rebuild.dims; ++i) {
      AddToRow(sums[i], key_ + i * kBlock);
    }
  }

  void LiftCodes(int64_t part_index, const HeadSpan& span) {
    const KeyRebuildArgs& rebuild = *params_.keys[part_index].rebuild;
    const LatentGroup& group = GroupOf(part_index, span);
    const float* up = rebuild.up[span.kv_head];
    const AttentionGrid::Chunks chunks = ChunksOf(part_index, span);
    for (const LatentChunk* chunk = chunks.begin; chunk != chunks.end;
         ++chunk) {
      loader_.LoadKeys(Latents(part_index), group, *chunk);
      const CodePiece* pieces = grid_.pieces(*chunk);
      for (int64_t p = 0; p < chunk->num_pieces; ++p) {
        const CodePiece& piece = pieces[p];
        TileArgs args = ProductArgs(up + piece.begin, group.width, piece.width,
                                    raw_, !piece.starts_run);
        args.b = loader_.tile() + (piece.begin - chunk->begin) * kBlock;
        Multiply<float>(args, rebuild.dims, kBlock);
        if (!piece.ends_run) continue;
        const float* sums = SumsOf(part_index, span, piece.run);
        for (int64_t i = 0; i < rebuild.dims; ++i) {
          ApplyRange(raw_ + i * kBlock, loader_.scales(p), loader_.minima(p),
                     sums[i], piece.run == 0, key_ + i * kBlock);
        }
      }
    }
  }

  // Copies the keys of a part that has no `up`, because its latents are the
  // keys themselves. Decodes them if they are stored as codes.
  void CopyKey(int64_t part_index, const HeadSpan& span) {
    const LatentPartArgs& part = Latents(part_index);
    const LatentGroup& group = GroupOf(part_index, span);
    const AttentionGrid::Chunks chunks = ChunksOf(part_index, span);
    for (const LatentChunk* chunk = chunks.begin; chunk != chunks.end;
         ++chunk) {
      loader_.LoadKeys(part, group, *chunk);
      float* to = key_ + chunk->begin * kBlock;
      if (chunk->num_pieces == 0) {
        std::copy_n(loader_.tile(), chunk->width * kBlock, to);
        continue;
      }
      const CodePiece* pieces = grid_.pieces(*chunk);
      for (int64_t p = 0; p < chunk->num_pieces; ++p) {
        for (int64_t c = pieces[p].begin; c < pieces[p].begin + pieces[p].width;
             ++c) {
          const int64_t row = (c - chunk->begin) * kBlock;
          for (int64_t s = 0; s < kBlock; s += kVecLanes) {
            const bool fixed = part.static_scale != nullptr;
            const Vec scale =
                fixed ? Broadcast(part.static_scale[group.column + c])
                      : LoadFloats(loader_.scales(p) + s);
            const Vec minimum =
                fixed ? Broadcast(part.static_minimum[group.column + c])
                      : LoadFloats(loader_.minima(p) + s);
            const Vec code = LoadFloats(loader_.tile() + row + s);
            hn::StoreU(Fma(code, scale, minimum), kFloats, to + row + s);
          }
        }
      }
    }
    if (group.num_runs == 0) return;
    for (int64_t c = CodedWidth(group); c < group.width; ++c) {
      std::fill_n(key_ + c * kBlock, kBlock,
                  part.static_minimum[group.column + c]);
    }
  }

  // Rotates the keys by the angles of the block's positions. Reuses the angles
  // in scratch if they were computed for the same part, steps and unit of
  // eviction.
  void Turn(int64_t part_index, int64_t kv_head) {
    const KeyRebuildArgs& rebuild = *params_.keys[part_index].rebuild;
    const int64_t first_step = kv_head * rebuild.head_steps_stride;
    const bool known = grid_.holds_angles() && angles_part_ == part_index &&
                       angles_step_ == first_step &&
                       angles_unit_ == PositionUnit(kv_head);
    Positions positions;
    if (!known) FindPositions(kv_head, &positions);
    for (int64_t f = 0; f < rebuild.num_pairs; ++f) {
      const int64_t row = grid_.holds_angles() ? f * kBlock : 0;
      if (!known) {
        FindAngles(rebuild.steps[first_step + f], positions,
                   rebuild.attention_factor, row);
      }
      TurnPair(key_ + rebuild.pair_dims[2 * f] * kBlock,
               key_ + rebuild.pair_dims[2 * f + 1] * kBlock, row);
    }
    angles_part_ = part_index;
    angles_step_ = first_step;
    angles_unit_ = PositionUnit(kv_head);
  }

  // The lower and upper halves of the positions of the block's slots; 0 for
  // slots that are not read.
  struct Positions {
    HWY_ALIGN uint32_t low[kBlock] = {};
    HWY_ALIGN uint32_t high[kBlock] = {};
  };
  // Returns the unit of eviction whose stored positions apply to the KV head,
  // or 0 if positions do not depend on the unit.
  int64_t PositionUnit(int64_t kv_head) const {
    return params_.mass.stored_positions ? params_.unit_of_head[kv_head] : 0;
  }
  uint64_t PositionOf(int64_t kv_head, int64_t slot) const {
    if (params_.mass.stored_positions) {
      const int64_t page =
          sequence_.block_table.device_address()[slot / params_.page_tokens];
      return PositionsOf(params_.metadata, page,
                         PositionUnit(kv_head))[slot % params_.page_tokens];
    }
    return static_cast<uint64_t>(
        sequence_.positions ? sequence_.positions.device_address()[slot]
                            : slot);
  }
  void FindPositions(int64_t kv_head, Positions* positions) const {
    const BlockSlots& slots = loader_.slots();
    for (int64_t s = slots.begin; s < slots.end; ++s) {
      const uint64_t position = PositionOf(kv_head, loader_.block() + s);
      positions->low[s] = static_cast<uint32_t>(position);
      positions->high[s] = static_cast<uint32_t>(position >> 32);
    }
  }

  // Computes the 64 cosines and sines by which one pair of key numbers is
  // rotated in the block's slots.
  void FindAngles(uint64_t step, const Positions& positions, float factor,
                  int64_t row) const {
    for (int64_t s = 0; s < kBlock; s += kVecLanes) {
      const WordHalves turns =
          TurnsAt(step, {hn::Load(kWords, positions.low + s),
                         hn::Load(kWords, positions.high + s)});
      const ReducedAngles angles = ReduceTurnsVec(turns);
      CosSinVec(angles.remainder, angles.quarter, factor, cosines_ + row + s,
                sines_ + row + s);
    }
  }

  void TurnPair(float* first, float* second, int64_t row) const {
    for (int64_t s = 0; s < kBlock; s += kVecLanes) {
      const Vec a = LoadFloats(first + s);
      const Vec b = LoadFloats(second + s);
      const Vec cosine = LoadFloats(cosines_ + row + s);
      const Vec sine = LoadFloats(sines_ + row + s);
      hn::StoreU(Fma(a, cosine, hn::Neg(hn::Mul(b, sine))), kFloats, first + s);
      hn::StoreU(Fma(b, cosine, hn::Mul(a, sine)), kFloats, second + s);
    }
  }

  const PagedAttentionArgs& params_;
  const AttentionGrid& grid_;
  const AttentionSequence& sequence_;
  BlockLoader& loader_;
  float* const keys_;
  float* const raw_;
  float* const cosines_;
  float* const sines_;
  float* const lift_sums_;
  float* key_ = nullptr;  // the keys that are being rebuilt
  bool holds_ = false;
  // Index of the part whose angles are in scratch. Negative if there is none.
  int64_t angles_part_ = -1;
  int64_t angles_step_ = 0;
  int64_t angles_unit_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_REBUILD_INL_H_
