// Computes attention for a unit of work on one thread, one block of 64 slots at
// a time. A unit's rows (one query head of one token each) are divided into
// panels, which take turns within each block. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_UNIT_WORKER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_UNIT_WORKER_INL_H_
#undef KVASIR_KERNELS_UNIT_WORKER_INL_H_
#else
#define KVASIR_KERNELS_UNIT_WORKER_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/attention/cpu/code_dots.h"
#include "kernels/attention/cpu/key_bias-inl.h"
#include "kernels/attention/cpu/latent_tile-inl.h"
#include "kernels/attention/cpu/pair_tile-inl.h"
#include "kernels/attention/cpu/rebuild-inl.h"
#include "kernels/attention/cpu/softmax-inl.h"
#include "kernels/attention/cpu/value_sums-inl.h"
#include "kernels/attention/grid/attention_grid.h"
#include "kernels/attention/grid/attention_rows.h"
#include "kernels/linear/tile-inl.h"
#include "kernels/simd/scalar_math.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

// Where to write the attention weights of a unit's rows for one split. They are
// added to the mass of slots afterwards (MassTile).
struct WeightSink {
  float* weights;       // [rows, 512]
  float* factors;       // [rows, blocks of a split], as in MassTile
  int64_t first_query;  // the query to which row 0 belongs
  int64_t num_heads;    // number of rows of each query
};

// Holds what all panels of a unit share: the loader of a block's slots, and the
// keys and values that are rebuilt or lifted from these slots.
class BlockTiles {
 public:
  BlockTiles(const AttentionGrid& grid, const AttentionUnit& unit,
             float* scratch)
      : params_(grid.params()),
        grid_(grid),
        unit_(grid, unit),
        loader_(grid, *unit.sequence, scratch),
        rebuilder_(grid, *unit.sequence, scratch, &loader_),
        lifter_(grid, scratch, &loader_) {}

  BlockLoader& loader() { return loader_; }
  KeyRebuilder& rebuilder() { return rebuilder_; }
  ValueLifter& lifter() { return lifter_; }
  // Must be called if only keys are needed. Then values are neither lifted
  // nor prefetched.
  void SkipValues() { keys_only_ = true; }

  // Queues the memory of `slots`, which are read next, for prefetching. Exact
  // rows are not prefetched, because there are few of them.
  void LookAhead(VisibleRange slots) {
    const VisibleRange keys =
        unit_.ReadIn(ReadAs::kStored, params_.key_exact, slots);
    for (int64_t p = 0; p < grid_.num_stored_keys(); ++p) {
      AddSpans(params_.keys[p].latents, unit_.KeySpans(p), keys);
    }
    if (keys_only_) return;
    const VisibleRange values =
        unit_.ReadIn(ReadAs::kStored, params_.value_exact, slots);
    for (int64_t p = 0; p < grid_.num_stored_values(); ++p) {
      AddSpans(params_.values[p].latents, unit_.ValueSpans(p), values);
    }
  }

  // Computes the sums of rows of `up` (KeyRebuildIn) that are kept for all
  // blocks. Must be called before the first block.
  void Start() const {
    for (int64_t p = 0; p < params_.num_key_parts; ++p) {
      if (params_.keys[p].rebuild == nullptr) continue;
      const AttentionGrid::Spans spans = unit_.KeySpans(p);
      for (const HeadSpan* span = spans.begin; span != spans.end; ++span) {
        rebuilder_.HoldSums(p, *span);
      }
    }
  }

  // Rebuilds the keys and lifts the values of `needed`, the slots that at least
  // one panel needs, once for all panels.
  void Hold(int64_t block, VisibleRange needed) {
    rebuilder_.set_holds(false);
    lifter_.set_holds(false);
    const ExactSlots& keys = params_.key_exact;
    const ExactSlots& values = params_.value_exact;
    const int64_t stored_keys = grid_.num_stored_keys();
    const int64_t stored_values = grid_.num_stored_values();
    HoldKeys({0, stored_keys}, block,
             unit_.ReadIn(ReadAs::kStored, keys, needed));
    HoldKeys({stored_keys, params_.num_key_parts}, block,
             unit_.ExactIn(keys, needed));
    if (!keys_only_) {
      HoldValues({0, stored_values}, block,
                 unit_.ReadIn(ReadAs::kStored, values, needed));
      HoldValues({stored_values, params_.num_value_parts}, block,
                 unit_.ExactIn(values, needed));
    }
    rebuilder_.set_holds(true);
    lifter_.set_holds(true);
  }

 private:
  // Queues the latents of the spans' groups for prefetching. A group that
  // several neighbouring spans share is queued once.
  void AddSpans(const LatentPartArgs& part, AttentionGrid::Spans spans,
                VisibleRange slots) {
    for (const HeadSpan* span = spans.begin; span != spans.end; ++span) {
      if (span != spans.begin && span[-1].group == span->group) continue;
      loader_.AddAhead(part, part.groups[span->group], slots);
    }
  }

  void HoldKeys(RowRange parts, int64_t block, VisibleRange slots) {
    if (slots.begin >= slots.end) return;
    loader_.StartBlock(block, slots);
    rebuilder_.StartBlock();
    for (int64_t p = parts.begin; p < parts.end; ++p) {
      if (params_.keys[p].rebuild == nullptr) continue;
      rebuilder_.Rebuild(p, *unit_.KeySpans(p).begin);
    }
  }
  void HoldValues(RowRange parts, int64_t block, VisibleRange slots) {
    if (slots.begin >= slots.end) return;
    loader_.StartBlock(block, slots);
    for (int64_t p = parts.begin; p < parts.end; ++p) {
      if (params_.values[p].lift == nullptr) continue;
      lifter_.Lift(p, *unit_.ValueSpans(p).begin);
    }
  }

  const PagedAttentionArgs& params_;
  const AttentionGrid& grid_;
  const UnitRows unit_;
  BlockLoader loader_;
  KeyRebuilder rebuilder_;
  ValueLifter lifter_;
  bool keys_only_ = false;
};

// Computes a panel on one thread. `state` points to the memory of the panel's
// PanelState.
class PanelWorker {
 public:
  PanelWorker(const AttentionGrid& grid, const AttentionUnit& panel,
              float* scratch, float* state, BlockTiles* tiles)
      : params_(grid.params()),
        grid_(grid),
        unit_(grid, panel),
        slots_(UnitSlots(params_, panel)),
        scratch_(scratch),
        state_(state),
        loader_(tiles->loader()),
        rebuilder_(tiles->rebuilder()),
        kept_(grid.mass().any() && KeepsWeights(*panel.sequence)
                  ? grid.mass_memory()
                  : nullptr),
        key_bias_(grid, unit_, state + grid.state().key_bias),
        values_(grid, unit_, scratch, state, &loader_, &tiles->lifter()) {}

  // For every key part with KeyPart::holds, writes the queries (or their
  // digits) to the panel's state. Also computes the sums of queries
  // (SumQueries). Must be called before the first block.
  void LoadQueries() const {
    key_bias_.LoadQueries();
    for (int64_t p = 0; p < params_.num_key_parts; ++p) {
      const AttentionGrid::Spans spans = unit_.KeySpans(p);
      for (const HeadSpan* span = spans.begin; span != spans.end; ++span) {
        const RowRange rows = unit_.RowsOf(*span);
        if (grid_.key(p).holds) {
          if (grid_.key(p).multiplies_codes) {
            CutQueries(p, *span, ChunksOf(p, *span));
          } else {
            CopyQueries(p, *span, 0, WidthOf(p, *span));
          }
        }
        if (grid_.key(p).num_sums == 0) continue;
        for (int64_t r = rows.begin; r < rows.end; ++r) {
          SumQueries(p, params_.keys[p].latents.groups[span->group], r);
        }
      }
    }
  }

  void StartSplit() const {
    const PanelState& at = grid_.state();
    std::fill_n(state_ + at.out, unit_.count() * grid_.out_width(), 0.0f);
    std::fill_n(state_ + at.out_minima, unit_.count() * grid_.minima_width(),
                0.0f);
    std::fill_n(state_ + at.max, unit_.count(), kNothing);
    std::fill_n(state_ + at.sum, unit_.count(), 0.0f);
  }
  // Returns the slots of the block that at least one row of the panel sees.
  VisibleRange SlotsIn(int64_t block) const {
    return {std::max(slots_.begin, block),
            std::min(slots_.end, block + kBlock)};
  }
  void AddBlock(int64_t block, VisibleRange needed) {
    Weigh(block, needed);
    if (kept_ != nullptr) KeepWeights(block);
    AddValues(block, needed);
  }
  // Computes only the block's weights and writes them to `sink`. Finish must
  // already have stored the maxima and sums of each row's whole softmax.
  void AddWeights(int64_t block, VisibleRange needed, const WeightSink& sink) {
    Weigh(block, needed);
    const float* weights = scratch_ + grid_.scratch().scores;
    const float* maxima = state_ + grid_.state().max;
    const int64_t b = block % kAttentionSplitSlots / kBlock;
    unit_.ForVisible(
        {0, unit_.count()}, block, [&](RowRange rows, VisibleRange) {
          for (int64_t r = rows.begin; r < rows.end; ++r) {
            const int64_t head = unit_.HeadOf(r);
            const int64_t to =
                (unit_.QueryOf(r) - sink.first_query) * sink.num_heads +
                grid_.mass().rank[static_cast<size_t>(head)];
            const int64_t row = unit_.TokenRow(r);
            sink.factors[to * kBlocksOfSplit + b] =
                Exp(maxima[r] - grid_.MassMaximaOf(row)[head]) *
                grid_.MassInversesOf(row)[head];
            CopyRow(weights + r * kBlock,
                    sink.weights + to * kAttentionSplitSlots + b * kBlock);
          }
        });
  }
  void EndSplit() const { values_.EndSplit(); }

  AttentionTotal Total() const {
    return {state_ + grid_.state().total_max, state_ + grid_.state().total_sum};
  }
  void ClearTotal(const AttentionTotal& total) const {
    std::fill_n(total.max, unit_.count(), kNothing);
    std::fill_n(total.sum, unit_.count(), 0.0f);
    unit_.ForValueRows([&](int64_t p, int64_t width, int64_t r) {
      std::fill_n(unit_.OutOf(p, r), width, 0.0f);
    });
  }

  // Merges the result of the current split into `total` and the output.
  void Merge(const AttentionTotal& total) const {
    const float* maxima = state_ + grid_.state().max;
    const float* sums = state_ + grid_.state().sum;
    float old_factor[kAttentionMaxRows];
    float new_factor[kAttentionMaxRows];
    bool any[kAttentionMaxRows];
    for (int64_t r = 0; r < unit_.count(); ++r) {
      any[r] = maxima[r] != kNothing || sums[r] != 0.0f;
      if (!any[r]) continue;
      const float max = total.max[r] > maxima[r] ? total.max[r] : maxima[r];
      old_factor[r] = Exp(total.max[r] - max);
      new_factor[r] = Exp(maxima[r] - max);
      total.sum[r] =
          std::fma(total.sum[r], old_factor[r], sums[r] * new_factor[r]);
      total.max[r] = max;
    }
    unit_.ForValueRows([&](int64_t p, int64_t width, int64_t r) {
      if (!any[r]) return;
      const float* from = state_ + grid_.state().out + r * grid_.out_width() +
                          grid_.value(p).out_offset;
      MergeOut(from, width, old_factor[r], new_factor[r], unit_.OutOf(p, r));
    });
  }

  void Finish(const AttentionTotal& total) const {
    for (int64_t r = 0; grid_.mass().any() && r < unit_.count(); ++r) {
      const int64_t row = unit_.TokenRow(r);
      grid_.MassMaximaOf(row)[unit_.HeadOf(r)] = total.max[r];
      grid_.MassInversesOf(row)[unit_.HeadOf(r)] = 1.0f / total.sum[r];
    }
    unit_.ForValueRows([&](int64_t p, int64_t width, int64_t r) {
      if (total.sum[r] == 0.0f && total.max[r] == kNothing) return;
      const LatentPartArgs& part = params_.values[p].latents;
      const AttentionGrid::ValuePart& value = grid_.value(p);
      float* out = unit_.OutOf(p, r);
      if (value.fixed_ranges && !value.sums_weights && !value.lifted) {
        const int64_t column = unit_.ValueGroup(p, r).column;
        for (int64_t i = 0; i < width; ++i) {
          out[i] = std::fma(out[i], part.static_scale[column + i],
                            total.sum[r] * part.static_minimum[column + i]);
        }
      }
      const Vec sum = Broadcast(total.sum[r]);
      int64_t i = 0;
      for (; i + kVecLanes <= width; i += kVecLanes) {
        hn::StoreU(hn::Div(LoadFloats(out + i), sum), kFloats, out + i);
      }
      for (; i < width; ++i) out[i] = out[i] / total.sum[r];
    });
  }

 private:
  // ----- Queries.

  int64_t WidthOf(int64_t p, const HeadSpan& span) const {
    const AttentionKeyPartArgs& part = params_.keys[p];
    return part.rebuild != nullptr ? part.rebuild->dims
                                   : part.latents.groups[span.group].width;
  }
  AttentionGrid::Chunks ChunksOf(int64_t p, const HeadSpan& span) const {
    return grid_.chunks(grid_.key(p).first_group, span.group);
  }
  float* QueriesOf(int64_t p) const {
    return state_ + grid_.state().q + grid_.key(p).q_offset;
  }
  float* SumsOf(int64_t p, int64_t r) const {
    const AttentionGrid::KeyPart& part = grid_.key(p);
    return state_ + grid_.state().query_sums + part.sums_offset +
           r * part.num_sums;
  }

  uint32_t* DigitsOf(int64_t p, int64_t r) const {
    return reinterpret_cast<uint32_t*>(QueriesOf(p) +
                                       r * grid_.key(p).held_width);
  }

  // Copies channels [first, first + width) of the queries of a span's rows to
  // the panel's state.
  void CopyQueries(int64_t p, const HeadSpan& span, int64_t first,
                   int64_t width) const {
    const RowRange rows = unit_.RowsOf(span);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      std::memcpy(QueriesOf(p) + r * grid_.key(p).held_width,
                  unit_.QueryRow(p, r) + first,
                  static_cast<size_t>(width) * sizeof(float));
    }
  }

  // Writes the digits of the queries of a span's rows to the panel's state, for
  // the channels of `chunks`. If ranges are static, the queries are first
  // multiplied by the scales.
  void CutQueries(int64_t p, const HeadSpan& span,
                  AttentionGrid::Chunks chunks) const {
    const LatentPartArgs& part = params_.keys[p].latents;
    const float* const scale =
        part.static_scale == nullptr
            ? nullptr
            : part.static_scale + part.groups[span.group].column;
    const RowRange rows = unit_.RowsOf(span);
    int64_t first = -1;
    for (const LatentChunk* chunk = chunks.begin; chunk != chunks.end;
         ++chunk) {
      for (int64_t i = 0; i < chunk->num_pieces; ++i) {
        const CodePiece& piece = grid_.pieces(*chunk)[i];
        if (first < 0) first = piece.digits;
        for (int64_t r = rows.begin; r < rows.end; ++r) {
          const float* q = unit_.QueryRow(p, r) + piece.begin;
          HWY_ALIGN float scaled[kDigitChannels];
          for (int64_t c = 0; scale != nullptr && c < piece.width; ++c) {
            scaled[c] = q[c] * scale[piece.begin + c];
          }
          CutQuery(piece, scale != nullptr ? scaled : q,
                   grid_.key(p).level_step,
                   DigitsOf(p, r) + piece.digits - first);
        }
      }
    }
  }

  // Computes the sums of a row's query that give the contribution of the codes'
  // minima to scores. If minima are static, the only sum is the dot product of
  // the query and the minima. Otherwise each run has the sum of the query's
  // channels, which is later multiplied by the run's minimum.
  void SumQueries(int64_t p, const LatentGroup& group, int64_t r) const {
    const LatentPartArgs& part = params_.keys[p].latents;
    const float* q = unit_.QueryRow(p, r);
    float* sums = SumsOf(p, r);
    if (part.static_scale != nullptr) {
      const float* minimum = part.static_minimum + group.column;
      float sum = 0.0f;
      for (int64_t c = 0; c < group.width; ++c) {
        sum = std::fma(q[c], minimum[c], sum);
      }
      sums[0] = sum;
      return;
    }
    for (int64_t run = 0; run < group.num_runs; ++run) {
      const CodeRun& channels = group.runs[run];
      float sum = 0.0f;
      for (int64_t i = 0; i < channels.width; ++i) {
        sum = sum + q[channels.begin + i];
      }
      sums[run] = sum;
    }
  }

  // ----- Scores.

  // Returns the arguments for multiplying the rows' queries, from channel
  // `first` on, by keys. The caller sets b and depth.
  TileArgs ScoreArgs(int64_t p, RowRange rows, int64_t first, float* to) const {
    TileArgs args = {};
    args.a = QueriesOf(p) + rows.begin * grid_.key(p).held_width + first;
    args.a_stride = grid_.key(p).held_width;
    args.b_stride = kBlock;
    args.c = to + rows.begin * kBlock;
    args.c_stride = kBlock;
    return args;
  }

  void ScorePart(int64_t p, float* to) {
    const AttentionKeyPartArgs& part = params_.keys[p];
    const AttentionGrid::Spans spans = unit_.KeySpans(p);
    if (part.rebuild != nullptr) {
      for (const HeadSpan* span = spans.begin; span != spans.end; ++span) {
        const RowRange rows = unit_.RowsOf(*span);
        TileArgs args = ScoreArgs(p, rows, 0, to);
        args.b = rebuilder_.Rebuild(p, *span);
        args.depth = part.rebuild->dims;
        Multiply<float>(args, rows.size(), kBlock);
      }
      return;
    }
    for (const HeadSpan* span = spans.begin; span != spans.end;) {
      const HeadSpan* end = span + 1;
      while (end != spans.end && end->group == span->group) ++end;
      ScoreGroup(p, span, end, to);
      span = end;
    }
  }

  // Computes the scores for spans [begin, end), which have the same group.
  void ScoreGroup(int64_t p, const HeadSpan* begin, const HeadSpan* end,
                  float* to) {
    if (grid_.key(p).multiplies_codes) return ScoreCodes(p, begin, end, to);
    const LatentPartArgs& part = params_.keys[p].latents;
    const LatentGroup& group = part.groups[begin->group];
    const AttentionGrid::Chunks chunks = ChunksOf(p, *begin);
    int64_t num_rows = 0;
    for (const HeadSpan* span = begin; span != end; ++span) {
      num_rows += unit_.RowsOf(*span).size();
    }
    const bool in_registers = kTakesPairs && num_rows <= kKeyPairsMostRows &&
                              part.dtype == DType::kBf16 &&
                              grid_.exact(part) == nullptr;
    for (const LatentChunk* chunk = chunks.begin; chunk != chunks.end;
         ++chunk) {
      if (in_registers) {
        loader_.LoadKeyWords(part, group, *chunk);
      } else {
        loader_.LoadKeys(part, group, *chunk);
      }
      for (const HeadSpan* span = begin; span != end; ++span) {
        int64_t first = chunk->begin;
        if (!grid_.key(p).holds) {
          CopyQueries(p, *span, chunk->begin, chunk->width);
          first = 0;
        }
        const RowRange rows = unit_.RowsOf(*span);
        TileArgs args = ScoreArgs(p, rows, first, to);
        args.b = loader_.tile();
        args.depth = chunk->width;
        args.accumulate = chunk->begin > 0;
        if (in_registers) {
          RunKeyPairs(rows.size(), {chunk->width, loader_.key_pairs(), args.a,
                                    args.a_stride, args.c, args.c_stride,
                                    args.accumulate, loader_.ahead()});
        } else {
          Multiply<float>(args, rows.size(), kBlock);
        }
      }
    }
  }

  // Like ScoreGroup, for absorbed keys that are stored as codes. It multiplies
  // the codes by the queries' digits.
  void ScoreCodes(int64_t p, const HeadSpan* begin, const HeadSpan* end,
                  float* to) {
    const LatentPartArgs& part = params_.keys[p].latents;
    const LatentGroup& group = part.groups[begin->group];
    const AttentionGrid::KeyPart& key = grid_.key(p);
    const bool in_slots = part.static_scale == nullptr;
    float* const sums = in_slots ? scratch_ + grid_.scratch().raw : to;
    const AttentionGrid::Chunks chunks = ChunksOf(p, *begin);
    for (const LatentChunk* chunk = chunks.begin; chunk != chunks.end;
         ++chunk) {
      loader_.LoadKeyWords(part, group, *chunk);
      const CodePiece* const pieces = grid_.pieces(*chunk);
      for (const HeadSpan* span = begin; span != end; ++span) {
        const RowRange rows = unit_.RowsOf(*span);
        if (!key.holds) CutQueries(p, *span, {chunk, chunk + 1});
        for (int64_t i = 0; i < chunk->num_pieces; ++i) {
          const CodePiece& piece = pieces[i];
          KeyDotsArgs args = {};
          args.planes = loader_.key_words();
          args.piece = &piece;
          args.levels = key.levels;
          args.digits = DigitsOf(p, rows.begin) + piece.digits -
                        (key.holds ? 0 : pieces[0].digits);
          args.digits_stride = key.held_width;
          args.c = sums + rows.begin * kBlock;
          args.accumulate = in_slots ? !piece.starts_run : piece.begin > 0;
          args.ahead = loader_.ahead();
          RunKeyDots(rows.size(), args);
          if (!in_slots || !piece.ends_run) continue;
          for (int64_t r = rows.begin; r < rows.end; ++r) {
            ApplyRange(sums + r * kBlock, loader_.scales(i), loader_.minima(i),
                       SumsOf(p, r)[piece.run], piece.run == 0,
                       to + r * kBlock);
          }
        }
      }
    }
    for (const HeadSpan* span = begin; !in_slots && span != end; ++span) {
      const RowRange rows = unit_.RowsOf(*span);
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        AddToRow(SumsOf(p, r)[0], to + r * kBlock);
      }
    }
  }

  // ----- One block.

  // Computes the scores of slots, summed over the stored key parts if `first`
  // is 0, or over the key parts of exact rows if `first` is num_stored_keys(),
  // the index of the first such part.
  void ScoreSlots(int64_t block, VisibleRange slots, int64_t first, float* to) {
    loader_.StartBlock(block, slots);
    rebuilder_.StartBlock();
    float* part_scores = scratch_ + grid_.scratch().scores_part;
    for (int64_t p = 0; p < grid_.num_stored_keys(); ++p) {
      ScorePart(first + p, p == 0 ? to : part_scores);
      if (p == 0) continue;
      for (int64_t i = 0; i < unit_.count() * kBlock; i += kVecLanes) {
        hn::StoreU(hn::Add(LoadFloats(to + i), LoadFloats(part_scores + i)),
                   kFloats, to + i);
      }
    }
  }

  // Computes scores from stored keys and from exact rows. If a block needs
  // both, all rows are scored in both ways. Then the scores of each row's exact
  // slots replace the scores from stored keys.
  void Score(int64_t block, VisibleRange needed) {
    const ExactSlots& slots = params_.key_exact;
    const VisibleRange stored = unit_.ReadIn(ReadAs::kStored, slots, needed);
    const VisibleRange exact = unit_.ExactIn(slots, needed);
    const bool both = stored.begin < stored.end && exact.begin < exact.end;
    float* scores = scratch_ + grid_.scratch().scores;
    if (stored.begin < stored.end) ScoreSlots(block, stored, 0, scores);
    if (exact.begin >= exact.end) return;
    float* from = both ? scratch_ + grid_.scratch().scores_exact : scores;
    ScoreSlots(block, exact, grid_.num_stored_keys(), from);
    for (int64_t r = 0; both && r < unit_.count(); ++r) {
      for (const ReadAs read : {ReadAs::kSinks, ReadAs::kWindow}) {
        const VisibleRange own = unit_.OfBlock(read, slots, r, block);
        if (own.begin >= own.end) continue;
        std::copy(from + r * kBlock + own.begin, from + r * kBlock + own.end,
                  scores + r * kBlock + own.begin);
      }
    }
  }

  // Adds weights times values to the sums, in the order of the slots.
  void AddValues(int64_t block, VisibleRange needed) {
    for (const ReadAs read :
         {ReadAs::kSinks, ReadAs::kStored, ReadAs::kWindow}) {
      const VisibleRange slots =
          unit_.ReadIn(read, params_.value_exact, needed);
      if (slots.begin >= slots.end) continue;
      loader_.StartBlock(block, slots);
      values_.AddBlock(read);
    }
  }

  void Weigh(int64_t block, VisibleRange needed) {
    Score(block, needed);
    key_bias_.Add(block, needed, scratch_ + grid_.scratch().scores);
    unit_.ForVisible({0, unit_.count()}, block,
                     [&](RowRange rows, VisibleRange visible) {
                       WeighScores(rows, visible);
                     });
  }

  // Keeps the block's weights, from which the attention mass is computed later.
  // Only called for a sequence with one new token, so each row of the panel is
  // a query head of this token.
  void KeepWeights(int64_t block) const {
    const int64_t num_heads = params_.num_heads;
    float* to = kept_ + grid_.mass().weights + unit_.sequence().weights_at +
                KeptBlockOffset(num_heads, slots_, block);
    const float* weights = scratch_ + grid_.scratch().scores;
    const float* maxima = state_ + grid_.state().max;
    const int64_t* heads = unit_.heads();
    for (int64_t r = 0; r < unit_.count(); ++r) {
      CopyRow(weights + r * kBlock, to + heads[r] * kBlock);
      // Prefetches the memory for the next block's weights, because otherwise
      // the stores would have to wait for it.
      const float* next = to + KeptBlockFloats(num_heads) + heads[r] * kBlock;
      for (int64_t s = 0; s < kBlock; s += 16) {
        __builtin_prefetch(next + s, 1, 2);
      }
      to[num_heads * kBlock + heads[r]] = maxima[r];
    }
  }
  static void CopyRow(const float* from, float* to) {
    for (int64_t s = 0; s < kBlock; s += kVecLanes) {
      hn::StoreU(LoadFloats(from + s), kFloats, to + s);
    }
  }

  // Turns the scores of `rows` into weights, and rescales the rows' earlier
  // sums to the new maxima.
  void WeighScores(RowRange rows, VisibleRange visible) const {
    const PanelState& at = grid_.state();
    SoftmaxArgs args = {};
    args.scores = scratch_ + grid_.scratch().scores;
    args.max = state_ + at.max;
    args.sum = state_ + at.sum;
    args.scale = params_.scale;
    args.cap = params_.score_cap;
    args.visible = visible;
    Softmax(args, rows, [&](int64_t r, float factor) {
      Scale(factor, grid_.out_width(), state_ + at.out + r * grid_.out_width());
      Scale(factor, grid_.minima_width(),
            state_ + at.out_minima + r * grid_.minima_width());
    });
  }

  // Multiplies `count` numbers, a multiple of 16, by the factor.
  static void Scale(float factor, int64_t count, float* numbers) {
    const Vec factors = Broadcast(factor);
    for (int64_t i = 0; i < count; i += kVecLanes) {
      hn::StoreU(hn::Mul(LoadFloats(numbers + i), factors), kFloats,
                 numbers + i);
    }
  }

  static void MergeOut(const float* part, int64_t width, float old_factor,
                       float new_factor, float* out) {
    const Vec old_vec = Broadcast(old_factor);
    const Vec new_vec = Broadcast(new_factor);
    int64_t i = 0;
    for (; i + kVecLanes <= width; i += kVecLanes) {
      const Vec added = hn::Mul(LoadFloats(part + i), new_vec);
      hn::StoreU(Fma(LoadFloats(out + i), old_vec, added), kFloats, out + i);
    }
    for (; i < width; ++i) {
      out[i] = std::fma(out[i], old_factor, part[i] * new_factor);
    }
  }

  const PagedAttentionArgs& params_;
  const AttentionGrid& grid_;
  const UnitRows unit_;
  const VisibleRange slots_;
  float* const scratch_;
  float* const state_;
  BlockLoader& loader_;
  KeyRebuilder& rebuilder_;
  float* const kept_;  // null: weights are not kept
  KeyBiasScores key_bias_;
  ValueSums values_;
};

// Computes a unit on one thread, panel after panel within each block. The keys
// and values of a block are rebuilt or lifted once for all panels.
class UnitWorker {
 public:
  UnitWorker(const AttentionGrid& grid, const AttentionUnit& unit,
             float* scratch)
      : grid_(grid),
        unit_(unit),
        scratch_(scratch),
        slots_(UnitSlots(grid.params(), unit)),
        num_panels_(grid.PanelsOf(unit)),
        tiles_(grid, unit, scratch),
        first_(grid, grid.PanelOf(unit, 0), scratch, StateOf(0), &tiles_) {}

  void Compute() {
    ForPanels([](PanelWorker& panel) { panel.ClearTotal(panel.Total()); });
    if (slots_.begin >= slots_.end) return;
    Start(slots_.begin);
    for (int64_t split = slots_.begin / kAttentionSplitSlots;
         split * kAttentionSplitSlots < slots_.end; ++split) {
      ComputeSplit(split, slots_.end);
      ForPanels([](PanelWorker& panel) { panel.Merge(panel.Total()); });
    }
    ForPanels([](PanelWorker& panel) { panel.Finish(panel.Total()); });
  }

  // Loads the queries and starts to prefetch. Must be called before the first
  // split. `slot` is the first slot that is read.
  void Start(int64_t slot) {
    tiles_.LookAhead(
        {slot, std::min((slot / kBlock + 1) * kBlock, slots_.end)});
    tiles_.loader().ahead()->NextBlock();
    tiles_.loader().ahead()->Read(0);
    tiles_.Start();
    ForPanels([](PanelWorker& panel) { panel.LoadQueries(); });
  }

  // Computes one split and leaves the result in the panels' states. Later slots
  // up to `read_next` may be prefetched, because this worker reads them next.
  void ComputeSplit(int64_t split, int64_t read_next) {
    ForPanels([](PanelWorker& panel) { panel.StartSplit(); });
    ForBlocks(split, read_next,
              [](PanelWorker& panel, int64_t block, VisibleRange needed) {
                panel.AddBlock(block, needed);
              });
    ForPanels([](PanelWorker& panel) { panel.EndSplit(); });
  }

  // Computes only the weights for a split's slots and writes them to `sink`.
  void WeighSplit(int64_t split, const WeightSink& sink) {
    if (FirstSlot(split) >= LastSlot(split)) return;
    tiles_.SkipValues();
    Start(FirstSlot(split));
    ForPanels([](PanelWorker& panel) { panel.StartSplit(); });
    ForBlocks(split, LastSlot(split),
              [&](PanelWorker& panel, int64_t block, VisibleRange needed) {
                panel.AddWeights(block, needed, sink);
              });
  }

  int64_t FirstSlot(int64_t split) const {
    return std::max(slots_.begin, split * kAttentionSplitSlots);
  }

  const PanelWorker& first_panel() const { return first_; }

 private:
  int64_t LastSlot(int64_t split) const {
    return std::min(slots_.end, (split + 1) * kAttentionSplitSlots);
  }
  // Calls add(panel, block, slots that the panel sees) for every block of a
  // split.
  template <typename Add>
  void ForBlocks(int64_t split, int64_t read_next, const Add& add) {
    const int64_t begin = FirstSlot(split);
    const int64_t end = LastSlot(split);
    for (int64_t block = begin / kBlock * kBlock; block < end;
         block += kBlock) {
      const VisibleRange slots = {std::max(begin, block),
                                  std::min(end, block + kBlock)};
      tiles_.LookAhead(
          {slots.end, std::min({read_next, slots_.end, slots.end + kBlock})});
      if (num_panels_ > 1) tiles_.Hold(block, slots);
      ForPanels([&](PanelWorker& panel) {
        const VisibleRange needed = panel.SlotsIn(block);
        if (needed.begin < needed.end) add(panel, block, needed);
      });
      tiles_.loader().ahead()->NextBlock();
    }
  }
  float* StateOf(int64_t panel) const {
    return scratch_ + grid_.scratch().states + panel * grid_.state().floats;
  }
  template <typename Function>
  void ForPanels(const Function& function) {
    function(first_);
    for (int64_t i = 1; i < num_panels_; ++i) {
      PanelWorker panel(grid_, grid_.PanelOf(unit_, i), scratch_, StateOf(i),
                        &tiles_);
      function(panel);
    }
  }

  const AttentionGrid& grid_;
  const AttentionUnit unit_;
  float* const scratch_;
  const VisibleRange slots_;
  const int64_t num_panels_;
  BlockTiles tiles_;
  PanelWorker first_;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_UNIT_WORKER_INL_H_
