#include "worker/attention_weights.h"

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

// What is made of a basis [width, keys] and its mean once both are read.
struct BasisParts {
  int64_t keys = 0;   // KV heads of the model * D
  int64_t width = 0;  // R'
  int64_t head_dim = 0;
  RankHeads heads;
  std::shared_ptr<std::vector<float>> basis;
  std::shared_ptr<std::vector<float>> mean;  // null: none
  float* up = nullptr;                       // [Hkv, D, R'], or null
  float* basis_bias = nullptr;               // [R']
  float* up_bias = nullptr;                  // [Hkv, D], or null
  float* lift_bias = nullptr;                // [Hq, D], or null

  void Finish() const {
    const int64_t first = heads.kv.first * head_dim;
    const int64_t own = heads.kv.count * head_dim;
    for (int64_t r = 0; r < width; ++r) {
      const float* const row = basis->data() + r * keys;
      for (int64_t i = 0; up != nullptr && i < own; ++i) {
        up[i * width + r] = row[first + i];
      }
      if (mean == nullptr) continue;
      double sum = 0;
      for (int64_t c = 0; c < keys; ++c) {
        sum += static_cast<double>(row[c]) *
               static_cast<double>((*mean)[static_cast<size_t>(c)]);
      }
      basis_bias[r] = static_cast<float>(-sum);
    }
    *basis = {};
    if (up_bias != nullptr) {
      std::copy_n(mean->begin() + first, own, up_bias);
    }
    const int64_t share = heads.query.count / heads.kv.count;
    for (int64_t h = 0; lift_bias != nullptr && h < heads.query.count; ++h) {
      std::copy_n(mean->begin() + first + h / share * head_dim, head_dim,
                  lift_bias + h * head_dim);
    }
  }
};

class AttentionPlanner {
 public:
  AttentionPlanner(const AttentionLoad& load, WeightJobs* jobs,
                   LayerWeights* weights)
      : load_(load),
        spec_(*load.spec),
        program_(weights->attention),
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
    KVASIR_RETURN_IF_ERROR(Ranges(program_.value, &weights_->value));
    KVASIR_RETURN_IF_ERROR(Output());
    for (const model::RequiredTensor& tensor : program_.tensors) {
      if (planned_.contains(tensor.name)) continue;
      int64_t columns = 1;
      for (size_t i = 1; i < tensor.shape.size(); ++i) {
        columns *= tensor.shape[i];
      }
      jobs_->ReadOnly(tensor.name, columns);
    }
    return absl::OkStatus();
  }

 private:
  // The full name of a tensor, noted as planned.
  std::string Name(const std::string& name) {
    std::string full = model::LayerTensorName(load_.layer, name);
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
    return jobs_->Floats(std::move(biases), program_.projection_columns,
                         &weights_->qkv_bias);
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

  // A vector [heads of the model, d]: the rank's heads of it.
  absl::Status HeadVector(const std::string& name, int64_t dims,
                          const float** out) {
    const base::HeadRange& heads = program_.heads.kv;
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
    // The complex lift [heads, 2, C] has a row per head.
    if (part.lift == QueryLift::kComplex) return FloatLifts(part, 1, own);
    if (!rebuilt) return absl::OkStatus();
    const int64_t dims = part.rebuild->dims;
    KVASIR_RETURN_IF_ERROR(FloatLifts(part, dims, own));
    return part.rebuild->has_bias
               ? HeadVector(part.prefix + ".up.bias", dims, &own->up_bias)
               : absl::OkStatus();
  }

  std::string LiftTensor(const PartProgram& part, const LatentProgram& latent) {
    return Name(absl::StrCat(part.prefix, ".", model::LiftName(latent.index)));
  }

  // Each head's `head_rows` rows of the lifts, as float32.
  absl::Status FloatLifts(const PartProgram& part, int64_t head_rows,
                          PartWeights* own) {
    own->up.assign(static_cast<size_t>(program_.heads.kv.count), nullptr);
    for (const LatentProgram& latent : part.latents) {
      TensorRows rows;
      rows.tensor = LiftTensor(part, latent);
      rows.columns = latent.width;
      const auto count = static_cast<int64_t>(latent.heads.size());
      for (int64_t i = 0; i < count; ++i) {
        rows.takes.push_back({latent.places[static_cast<size_t>(i)] * head_rows,
                              head_rows, i * head_rows});
      }
      const int64_t head_size = head_rows * latent.width;
      const float* up = nullptr;
      KVASIR_RETURN_IF_ERROR(
          jobs_->Floats({std::move(rows)}, count * head_size, &up));
      jobs_->CountAsMatrix(count * head_size *
                           static_cast<int64_t>(sizeof(float)));
      for (int64_t i = 0; i < count; ++i) {
        own->up[static_cast<size_t>(latent.heads[static_cast<size_t>(i)])] =
            up + i * head_size;
      }
    }
    return absl::OkStatus();
  }

  // A packed matrix of each head of its [dims, R'] rows of the lifts: kPack for
  // sums of latents, kPackRows for queries.
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
      job.reads.push_back(std::move(read));
      jobs_->Add(std::move(job));
    }
    return absl::OkStatus();
  }

  // The basis as the matrix that makes latents and, by `kind`, as each head's
  // lift: kPack for queries, kPackRows for sums of latents, kFloats (turned
  // round) for rebuilt keys. Its mean as what both leave out.
  absl::Status Basis(const PartProgram& part, WeightSink::Kind kind,
                     PartWeights* own) {
    const int64_t d = spec_.head_dim;
    const int64_t width = part.latent_columns;
    BasisParts parts;
    parts.keys = spec_.num_kv_heads * d;
    parts.width = width;
    parts.head_dim = d;
    parts.heads = program_.heads;
    TensorRead read;
    read.tensor = Name(part.prefix + ".basis.weight");
    read.columns = parts.keys;
    const auto pack = [&](WeightSink::Kind how, int64_t first_column, int64_t k,
                          int64_t n, PackedMatrix* matrix) -> absl::Status {
      WeightSink sink;
      sink.kind = how;
      sink.takes = {{0, width, 0}};
      sink.first_column = first_column;
      matrix->k = k;
      matrix->n = n;
      KVASIR_ASSIGN_OR_RETURN(sink.memory,
                              jobs_->AllocateMatrix(read.tensor, matrix));
      sink.shape = *matrix;
      read.sinks.push_back(std::move(sink));
      return absl::OkStatus();
    };
    KVASIR_RETURN_IF_ERROR(
        pack(WeightSink::Kind::kPack, 0, parts.keys, width, &own->basis));
    WeightJob job;
    job.bytes = own->basis.bytes();
    if (kind == WeightSink::Kind::kFloats) {
      const int64_t size = parts.heads.kv.count * d * width;
      KVASIR_ASSIGN_OR_RETURN(parts.up, Floats(size));
      jobs_->CountAsMatrix(size * static_cast<int64_t>(sizeof(float)));
      for (int64_t j = 0; j < parts.heads.kv.count; ++j) {
        own->up.push_back(parts.up + j * d * width);
      }
    } else {
      own->lift.resize(static_cast<size_t>(parts.heads.kv.count));
      for (int64_t j = 0; j < parts.heads.kv.count; ++j) {
        const bool query = kind == WeightSink::Kind::kPack;
        KVASIR_RETURN_IF_ERROR(pack(kind, (parts.heads.kv.first + j) * d,
                                    query ? d : width, query ? width : d,
                                    &own->lift[static_cast<size_t>(j)]));
      }
    }
    parts.basis = Passing(parts.width, parts.keys, &read);
    job.reads.push_back(std::move(read));
    if (part.has_mean) {
      TensorRead mean;
      mean.tensor = Name(part.prefix + ".basis.mean");
      parts.mean = Passing(parts.keys, 1, &mean);
      job.reads.push_back(std::move(mean));
      KVASIR_ASSIGN_OR_RETURN(parts.basis_bias, Floats(width));
      own->basis_bias = parts.basis_bias;
      if (kind == WeightSink::Kind::kFloats) {
        KVASIR_ASSIGN_OR_RETURN(parts.up_bias,
                                Floats(parts.heads.kv.count * d));
        own->up_bias = parts.up_bias;
      } else if (kind == WeightSink::Kind::kPackRows) {
        KVASIR_ASSIGN_OR_RETURN(parts.lift_bias,
                                Floats(parts.heads.query.count * d));
        own->lift_bias = parts.lift_bias;
      }
    }
    job.finish = [parts] { parts.Finish(); };
    jobs_->Add(std::move(job));
    return absl::OkStatus();
  }

  absl::StatusOr<float*> Floats(int64_t size) {
    KVASIR_ASSIGN_OR_RETURN(
        void* const memory,
        jobs_->Allocate(size * static_cast<int64_t>(sizeof(float))));
    return static_cast<float*>(memory);
  }

  static std::shared_ptr<std::vector<float>> Passing(int64_t rows,
                                                     int64_t columns,
                                                     TensorRead* read) {
    WeightSink sink;
    sink.takes = {{0, rows, 0}};
    sink.passing = std::make_shared<std::vector<float>>();
    sink.passing_size = rows * columns;
    read->sinks.push_back(sink);
    return sink.passing;
  }

  absl::Status Ranges(const PartProgram& part, PartWeights* own) {
    if (!part.static_ranges) return absl::OkStatus();
    KVASIR_RETURN_IF_ERROR(
        jobs_->Floats({{Name(part.prefix + ".range.min"), 1, part.range_takes}},
                      part.latent_columns, &own->range_minimum));
    return jobs_->Floats(
        {{Name(part.prefix + ".range.scale"), 1, part.range_takes}},
        part.latent_columns, &own->range_scale);
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
