#include "worker/weights/attention_weights.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::worker {
namespace {

using kernels::PackedMatrix;

// All arrays that are computed from the rows of a basis [width, keys] and from
// its mean. `keys` is the number of dims of all KV heads together. The mean is
// read before the rows.
struct BasisParts {
  int64_t width = 0;     // R'
  int64_t head_dim = 0;  // D
  RankHeads heads;
  std::vector<float> mean;             // [keys]; empty: no mean
  WeightMemory* up = nullptr;          // [Hkv, D, R'], or null
  WeightMemory* value_up = nullptr;    // [Hkv, R', D], or null
  WeightMemory* basis_bias = nullptr;  // [R']
  WeightMemory* up_bias = nullptr;     // [Hkv, D], or null
  WeightMemory* lift_bias = nullptr;   // [Hq, D], or null

  // The members of type WeightMemory* that are not null.
  std::vector<WeightMemory*> memory() const {
    std::vector<WeightMemory*> all = {up, value_up, basis_bias, up_bias,
                                      lift_bias};
    all.erase(std::remove(all.begin(), all.end(), nullptr), all.end());
    return all;
  }
  int64_t first_key() const { return heads.kv.first * head_dim; }

  // Computes everything that depends on row r of the basis.
  void Add(int64_t r, const float* row) const {
    for (int64_t i = 0; up != nullptr && i < heads.kv.count * head_dim; ++i) {
      up->host_floats()[i * width + r] = row[first_key() + i];
    }
    for (int64_t j = 0; value_up != nullptr && j < heads.kv.count; ++j) {
      std::copy_n(row + first_key() + j * head_dim, head_dim,
                  value_up->host_floats((j * width + r) * head_dim));
    }
    if (mean.empty()) return;
    double sum = 0;
    for (size_t c = 0; c < mean.size(); ++c) {
      sum += static_cast<double>(row[c]) * static_cast<double>(mean[c]);
    }
    basis_bias->host_floats()[r] = static_cast<float>(-sum);
  }

  void AddMean() const {
    const float* const own = mean.data() + first_key();
    if (up_bias != nullptr) {
      std::copy_n(own, heads.kv.count * head_dim, up_bias->host_floats());
    }
    const int64_t share = heads.query.count / heads.kv.count;
    for (int64_t h = 0; lift_bias != nullptr && h < heads.query.count; ++h) {
      std::copy_n(own + h / share * head_dim, head_dim,
                  lift_bias->host_floats(h * head_dim));
    }
  }
};

// Expands the complex lift u [2, C] of one head to a real matrix [2n, 2C],
// where n is the number of pairs that the lift covers. The matrix computes the
// head's key k = u z from the latent z.
struct RealLift {
  const float* complex = nullptr;
  int64_t num_pairs = 0;     // n
  int64_t num_channels = 0;  // C
  bool interleaved = false;  // the two dims of a pair are adjacent
  float* real = nullptr;     // filled with zeros by the caller

  void Make(const std::vector<int64_t>& channel_place) const {
    for (int64_t c = 0; c < num_channels; ++c) {
      const int64_t pair = channel_place[static_cast<size_t>(c)];
      float* const re =
          real + (interleaved ? 2 * pair : pair) * 2 * num_channels;
      float* const im = re + (interleaved ? 1 : num_pairs) * 2 * num_channels;
      const float a = complex[c];
      const float b = complex[num_channels + c];
      re[c] = a;
      re[num_channels + c] = -b;
      im[c] = b;
      im[num_channels + c] = a;
    }
  }
};

// Checks that no scale of a static range is negative.
absl::Status CheckScales(const std::string& tensor,
                         const std::vector<RowTake>& takes,
                         const float* scales) {
  for (const RowTake& take : takes) {
    for (int64_t i = 0; i < take.count; ++i) {
      const float scale = scales[take.column + i];
      if (scale >= 0) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", tensor, ": row ", take.row + i,
                       ": the scale must be at least 0, but is ", scale));
    }
  }
  return absl::OkStatus();
}

class AttentionPlanner {
 public:
  AttentionPlanner(const AttentionLoad& load, WeightJobs* jobs,
                   LayerWeights* weights)
      : load_(load),
        spec_(*load.spec),
        program_(*weights->attention),
        jobs_(jobs),
        weights_(weights) {}

  absl::Status Plan() {
    KVASIR_RETURN_IF_ERROR(FusedProjection());
    for (const KeyProgram& part : program_.key) {
      KVASIR_RETURN_IF_ERROR(Key(part, &weights_->key.emplace_back()));
    }
    const ValueProgram& value = program_.value;
    if (value.has_basis) {
      KVASIR_RETURN_IF_ERROR(
          Basis(value, WeightSink::Kind::kPackRows, &weights_->value));
    } else if (value.lifted) {
      KVASIR_RETURN_IF_ERROR(MatrixLifts(
          value, spec_.head_dim, WeightSink::Kind::kPack, &weights_->value));
    }
    if (program_.joint) {
      weights_->value.range_minimum = weights_->key.back().range_minimum;
      weights_->value.range_scale = weights_->key.back().range_scale;
    } else {
      KVASIR_RETURN_IF_ERROR(Ranges(value, &weights_->value));
    }
    KVASIR_RETURN_IF_ERROR(Output());
    for (const plan::RequiredTensor& tensor : program_.tensors) {
      std::string name = plan::LayerTensorName(load_.layer, tensor.name);
      if (planned_.contains(name)) continue;
      int64_t columns = 1;
      for (size_t i = 1; i < tensor.shape.size(); ++i) {
        columns *= tensor.shape[i];
      }
      jobs_->ReadOnly(std::move(name), columns);
    }
    return absl::OkStatus();
  }

 private:
  // Returns the full name of a tensor and marks it as planned.
  std::string Name(const std::string& name) {
    std::string full = plan::LayerTensorName(load_.layer, name);
    planned_.insert(full);
    return full;
  }

  absl::Status FusedProjection() {
    std::vector<TensorRows> rows;
    std::vector<TensorRows> biases;
    for (const Projection& projection : program_.projections) {
      rows.push_back({Name(projection.name + ".weight"), spec_.hidden_size,
                      projection.takes});
      if (!projection.has_bias) continue;
      biases.push_back({Name(projection.name + ".bias"), 1, projection.takes});
    }
    KVASIR_RETURN_IF_ERROR(
        jobs_->Matrix(std::move(rows), spec_.hidden_size, &weights_->qkv));
    if (!program_.has_bias) return absl::OkStatus();
    auto host = std::make_shared<std::vector<float>>(
        static_cast<size_t>(program_.projection_columns), 1.0F);
    weights_->host_qkv_bias = host;
    return jobs_->Floats(std::move(biases), program_.projection_columns,
                         &weights_->qkv_bias, [host](absl::Span<float> loaded) {
                           std::copy(loaded.begin(), loaded.end(),
                                     host->begin());
                         });
  }

  absl::Status Output() {
    const int64_t m = spec_.hidden_size;
    KVASIR_RETURN_IF_ERROR(jobs_->Matrix({{Name("self_attn.o_proj.weight"),
                                           program_.output_all_columns,
                                           {{0, m, 0}},
                                           program_.output_first_column}},
                                         program_.output_columns,
                                         &weights_->o));
    if (!program_.output_bias || !load_.first_rank) return absl::OkStatus();
    return jobs_->Floats({{Name("self_attn.o_proj.bias"), 1, {{0, m, 0}}}}, m,
                         &weights_->o_bias);
  }

  // Loads this rank's part of a vector that has d (`dims`) elements for each KV
  // head of the model.
  absl::Status HeadVector(const std::string& name, int64_t dims,
                          kernels::DevicePtr<const float>* out) {
    const plan::HeadRange& heads = program_.heads.kv;
    return jobs_->Floats(
        {{Name(name), 1, {{heads.first * dims, heads.count * dims, 0}}}},
        heads.count * dims, out);
  }

  absl::Status Key(const KeyProgram& part, PartWeights* own) {
    KVASIR_RETURN_IF_ERROR(Ranges(part, own));
    const bool rebuilt = part.rebuild.has_value() && part.rebuild->lifted;
    if (part.has_basis) {
      return Basis(
          part, rebuilt ? WeightSink::Kind::kFloats : WeightSink::Kind::kPack,
          own);
    }
    if (part.lift == QueryLift::kMatrix) {
      return MatrixLifts(part, part.projected.width[0],
                         WeightSink::Kind::kPackRows, own);
    }
    if (part.lift == QueryLift::kComplex) return ComplexLifts(part, own);
    if (!rebuilt) return absl::OkStatus();
    const int64_t dims = part.rebuild->dims;
    for (const LatentProgram& latent : part.latents) {
      KVASIR_ASSIGN_OR_RETURN(WeightJob job,
                              FloatLifts(part, latent, dims, own));
      jobs_->Add(std::move(job));
    }
    return part.rebuild->has_bias
               ? HeadVector(
                     absl::StrCat(part.prefix, ".", part.lift_prefix, ".bias"),
                     dims, &own->up_bias)
               : absl::OkStatus();
  }

  std::string LiftTensor(const PartProgram& part, const LatentProgram& latent) {
    return Name(absl::StrCat(part.prefix, ".",
                             plan::LiftName(part.lift_prefix, latent.index)));
  }

  // Makes a job that loads a latent's lift as float32. The lift has `head_rows`
  // rows for each head.
  absl::StatusOr<WeightJob> FloatLifts(const PartProgram& part,
                                       const LatentProgram& latent,
                                       int64_t head_rows, PartWeights* own) {
    own->up.resize(static_cast<size_t>(program_.heads.kv.count));
    const int64_t head_size = head_rows * latent.width;
    WeightSink sink;
    WeightJob job;
    KVASIR_ASSIGN_OR_RETURN(sink.memory,
                            HeadFloats(latent, head_size, &own->up, &job));
    jobs_->CountAsMatrix(job.bytes);
    for (size_t i = 0; i < latent.heads.size(); ++i) {
      sink.takes.push_back({latent.places[i] * head_rows, head_rows,
                            static_cast<int64_t>(i) * head_rows});
    }
    TensorRead read;
    read.tensor = LiftTensor(part, latent);
    read.columns = latent.width;
    read.sinks.push_back(std::move(sink));
    job.reads.push_back(std::move(read));
    return job;
  }

  // Allocates `head_size` floats for each head of a latent.
  absl::StatusOr<WeightMemory*> HeadFloats(
      const LatentProgram& latent, int64_t head_size,
      std::vector<kernels::DevicePtr<const float>>* of_head, WeightJob* job) {
    const auto count = static_cast<int64_t>(latent.heads.size());
    KVASIR_ASSIGN_OR_RETURN(WeightMemory* const memory,
                            Floats(count * head_size));
    job->memory.push_back(memory);
    job->bytes += count * head_size * static_cast<int64_t>(sizeof(float));
    for (int64_t i = 0; i < count; ++i) {
      (*of_head)[static_cast<size_t>(latent.heads[static_cast<size_t>(i)])] =
          memory->floats(i * head_size);
    }
    return memory;
  }

  // Loads the complex lifts [heads, 2, C], one row per head. For prompts, also
  // expands them to matrices of real numbers.
  absl::Status ComplexLifts(const KeyProgram& part, PartWeights* own) {
    for (const LatentProgram& latent : part.latents) {
      KVASIR_ASSIGN_OR_RETURN(WeightJob job, FloatLifts(part, latent, 1, own));
      if (part.prompt_lift.has_value()) {
        const int64_t dims = part.prompt_lift->dims;
        const int64_t size = dims * latent.width;
        own->prompt_up.resize(own->up.size());
        KVASIR_ASSIGN_OR_RETURN(
            const WeightMemory* const real,
            HeadFloats(latent, size, &own->prompt_up, &job));
        const WeightMemory* const complex = job.reads[0].sinks[0].memory;
        RealLift first;
        first.num_pairs = dims / 2;
        first.num_channels = latent.width / 2;
        first.interleaved =
            spec_.rope.pairing == model::RopePairing::kInterleaved;
        job.finish = [first, size, real, complex,
                      count = static_cast<int64_t>(latent.heads.size()),
                      places = latent.channel_place]() -> absl::Status {
          std::fill_n(real->host_floats(), count * size, 0.0f);
          for (int64_t i = 0; i < count; ++i) {
            RealLift lift = first;
            lift.complex = complex->host_floats(i * 2 * first.num_channels);
            lift.real = real->host_floats(i * size);
            lift.Make(places);
          }
          return absl::OkStatus();
        };
      }
      jobs_->Add(std::move(job));
    }
    return absl::OkStatus();
  }

  // Loads a packed matrix for each head from the head's [dims, R'] rows of the
  // lift. `kind` is kPack to lift sums of latents, kPackRows to lift queries.
  absl::Status MatrixLifts(const PartProgram& part, int64_t dims,
                           WeightSink::Kind kind, PartWeights* own) {
    own->lift.resize(static_cast<size_t>(program_.heads.kv.count));
    for (const LatentProgram& latent : part.latents) {
      WeightJob job;
      TensorRead read;
      read.tensor = LiftTensor(part, latent);
      read.columns = latent.width;
      for (size_t i = 0; i < latent.heads.size(); ++i) {
        PackedMatrix& lift = own->lift[static_cast<size_t>(latent.heads[i])];
        lift.k = kind == WeightSink::Kind::kPack ? latent.width : dims;
        lift.n = kind == WeightSink::Kind::kPack ? dims : latent.width;
        WeightSink sink;
        sink.kind = kind;
        sink.takes = {{latent.places[i] * dims, dims, 0}};
        KVASIR_ASSIGN_OR_RETURN(sink.memory,
                                jobs_->AllocateMatrix(read.tensor, &lift));
        sink.shape = lift;
        job.bytes += lift.bytes();
        read.sinks.push_back(std::move(sink));
      }
      if (part.prompt_lift.has_value()) {
        KVASIR_RETURN_IF_ERROR(
            PromptLifts(latent, dims, kind, own, &job, &read.sinks));
      }
      job.reads.push_back(std::move(read));
      jobs_->Add(std::move(job));
    }
    return absl::OkStatus();
  }

  // For prompts, loads the rows of MatrixLifts again as float32. Keys
  // (kPackRows) stay as they are stored; values (kPack) are transposed.
  absl::Status PromptLifts(const LatentProgram& latent, int64_t dims,
                           WeightSink::Kind kind, PartWeights* own,
                           WeightJob* job, std::vector<WeightSink>* sinks) {
    own->prompt_up.resize(static_cast<size_t>(program_.heads.kv.count));
    KVASIR_ASSIGN_OR_RETURN(
        WeightMemory* const memory,
        HeadFloats(latent, dims * latent.width, &own->prompt_up, job));
    for (size_t i = 0; i < latent.heads.size(); ++i) {
      const int64_t first_row = latent.places[i] * dims;
      const int64_t to = static_cast<int64_t>(i) * dims;
      WeightSink sink;
      sink.takes = {{first_row, dims, to}};
      sink.memory = memory;
      if (kind == WeightSink::Kind::kPack) {
        sink.kind = WeightSink::Kind::kVisit;
        sink.visit = [memory, begin = to * latent.width, first_row, dims,
                      width = latent.width](int64_t first, int64_t count,
                                            const float* numbers) {
          float* const up = memory->host_floats(begin);
          for (int64_t row = 0; row < count; ++row) {
            for (int64_t r = 0; r < width; ++r) {
              up[r * dims + first - first_row + row] = numbers[row * width + r];
            }
          }
        };
      }
      sinks->push_back(std::move(sink));
    }
    return absl::OkStatus();
  }

  // Loads the basis twice: as the matrix that makes latents, and as each head's
  // lift. The lift's `kind` is kPack for queries, kPackRows for sums of
  // latents, or kFloats (transposed) for rebuilt keys. Also loads the mean,
  // which is subtracted when latents are made and added when they are lifted.
  absl::Status Basis(const PartProgram& part, WeightSink::Kind kind,
                     PartWeights* own) {
    auto parts = std::make_shared<BasisParts>();
    parts->width = part.latent_columns;
    parts->head_dim = spec_.head_dim;
    parts->heads = program_.heads;
    WeightJob job;
    if (part.has_mean) {
      KVASIR_ASSIGN_OR_RETURN(TensorRead mean,
                              BasisMean(part, kind, parts, own));
      job.reads.push_back(std::move(mean));
    }
    const int64_t d = spec_.head_dim;
    const plan::HeadRange& heads = program_.heads.kv;
    TensorRead read;
    read.tensor = Name(part.prefix + ".basis.weight");
    read.columns = spec_.num_kv_heads * d;
    const std::vector<RowTake> all = {{0, parts->width, 0}};
    const auto pack = [&](WeightSink::Kind how, int64_t first_column, int64_t k,
                          int64_t n, PackedMatrix* matrix) -> absl::Status {
      WeightSink sink;
      sink.kind = how;
      sink.takes = all;
      sink.first_column = first_column;
      matrix->k = k;
      matrix->n = n;
      KVASIR_ASSIGN_OR_RETURN(sink.memory,
                              jobs_->AllocateMatrix(read.tensor, matrix));
      sink.shape = *matrix;
      read.sinks.push_back(std::move(sink));
      return absl::OkStatus();
    };
    KVASIR_RETURN_IF_ERROR(pack(WeightSink::Kind::kPack, 0, read.columns,
                                parts->width, &own->basis));
    job.bytes = own->basis.bytes();
    if (kind == WeightSink::Kind::kFloats) {
      const int64_t size = heads.count * d * parts->width;
      KVASIR_ASSIGN_OR_RETURN(parts->up, Floats(size));
      jobs_->CountAsMatrix(size * static_cast<int64_t>(sizeof(float)));
      for (int64_t j = 0; j < heads.count; ++j) {
        own->up.push_back(parts->up->floats(j * d * parts->width));
      }
    } else {
      own->lift.resize(static_cast<size_t>(heads.count));
      for (int64_t j = 0; j < heads.count; ++j) {
        const bool query = kind == WeightSink::Kind::kPack;
        KVASIR_RETURN_IF_ERROR(
            pack(kind, (heads.first + j) * d, query ? d : parts->width,
                 query ? parts->width : d, &own->lift[static_cast<size_t>(j)]));
      }
      KVASIR_RETURN_IF_ERROR(
          PromptBasis(part, kind == WeightSink::Kind::kPack, parts.get(), own));
    }
    if (parts->up != nullptr || parts->value_up != nullptr || part.has_mean) {
      WeightSink sink;
      sink.kind = WeightSink::Kind::kVisit;
      sink.takes = all;
      sink.visit = [parts, columns = read.columns](int64_t first, int64_t count,
                                                   const float* numbers) {
        for (int64_t i = 0; i < count; ++i) {
          parts->Add(first + i, numbers + i * columns);
        }
      };
      read.sinks.push_back(std::move(sink));
    }
    job.reads.push_back(std::move(read));
    job.memory = parts->memory();
    jobs_->Add(std::move(job));
    return absl::OkStatus();
  }

  // Allocates each head's prompt lift, which is computed from the basis.
  absl::Status PromptBasis(const PartProgram& part, bool keys,
                           BasisParts* parts, PartWeights* own) {
    if (!part.prompt_lift.has_value()) return absl::OkStatus();
    const int64_t head_size = spec_.head_dim * parts->width;
    const int64_t num_heads = program_.heads.kv.count;
    KVASIR_ASSIGN_OR_RETURN(WeightMemory* const memory,
                            Floats(num_heads * head_size));
    (keys ? parts->up : parts->value_up) = memory;
    for (int64_t j = 0; j < num_heads; ++j) {
      own->prompt_up.push_back(memory->floats(j * head_size));
    }
    return absl::OkStatus();
  }

  // Plans to read the mean into `parts`, and allocates memory for what is
  // computed from the mean.
  absl::StatusOr<TensorRead> BasisMean(const PartProgram& part,
                                       WeightSink::Kind kind,
                                       std::shared_ptr<BasisParts> parts,
                                       PartWeights* own) {
    const int64_t d = spec_.head_dim;
    const int64_t keys = spec_.num_kv_heads * d;
    KVASIR_ASSIGN_OR_RETURN(parts->basis_bias, Floats(parts->width));
    own->basis_bias = parts->basis_bias->floats();
    if (kind == WeightSink::Kind::kFloats) {
      KVASIR_ASSIGN_OR_RETURN(parts->up_bias,
                              Floats(program_.heads.kv.count * d));
      own->up_bias = parts->up_bias->floats();
    } else if (kind == WeightSink::Kind::kPackRows) {
      KVASIR_ASSIGN_OR_RETURN(parts->lift_bias,
                              Floats(program_.heads.query.count * d));
      own->lift_bias = parts->lift_bias->floats();
    }
    WeightSink sink;
    sink.kind = WeightSink::Kind::kVisit;
    sink.takes = {{0, keys, 0}};
    sink.visit = [parts, keys](int64_t first, int64_t count,
                               const float* numbers) {
      parts->mean.insert(parts->mean.end(), numbers, numbers + count);
      if (first + count == keys) parts->AddMean();
    };
    TensorRead mean;
    mean.tensor = Name(part.prefix + ".basis.mean");
    mean.sinks.push_back(std::move(sink));
    return mean;
  }

  absl::StatusOr<WeightMemory*> Floats(int64_t size) {
    return jobs_->Allocate(size * static_cast<int64_t>(sizeof(float)));
  }

  absl::Status Ranges(const PartProgram& part, PartWeights* own) {
    if (!part.static_ranges) return absl::OkStatus();
    KVASIR_RETURN_IF_ERROR(Range(part, false, &own->range_minimum));
    return Range(part, true, &own->range_scale);
  }

  absl::Status Range(const PartProgram& part, bool scale,
                     kernels::DevicePtr<const float>* out) {
    KVASIR_ASSIGN_OR_RETURN(WeightMemory* const range,
                            Floats(part.latent_columns));
    *out = range->floats();
    WeightSink sink;
    sink.takes = part.range_takes;
    sink.memory = range;
    TensorRead read;
    read.tensor = Name(part.prefix + (scale ? ".range.scale" : ".range.min"));
    read.sinks.push_back(std::move(sink));
    WeightJob job;
    job.bytes = part.latent_columns * static_cast<int64_t>(sizeof(float));
    if (scale) {
      job.finish = [tensor = read.tensor, takes = part.range_takes, range] {
        return CheckScales(tensor, takes, range->host_floats());
      };
    }
    job.reads.push_back(std::move(read));
    jobs_->Add(std::move(job));
    return absl::OkStatus();
  }

  const AttentionLoad& load_;
  const model::DecoderSpec& spec_;
  const AttentionProgram& program_;
  WeightJobs* const jobs_;
  LayerWeights* const weights_;
  std::set<std::string> planned_;
};

}  // namespace

absl::Status PlanAttention(const AttentionLoad& load, WeightJobs* jobs,
                           LayerWeights* weights) {
  return AttentionPlanner(load, jobs, weights).Plan();
}

}  // namespace kvasir::worker
