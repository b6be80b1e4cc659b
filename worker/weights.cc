#include "worker/weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "kernels/pack.h"
#include "model/checkpoint.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::PackedMatrix;

// A tensor [rows, columns] of which the rank takes a rectangle.
struct Part {
  std::string tensor;
  int64_t columns = 0;    // as stored
  int64_t first_row = 0;  // taken
  int64_t num_rows = 0;
  int64_t first_column = 0;  // taken; as many as the matrix has k
};

// Work of one thread: a matrix from its parts side by side, a plain copy of a
// table, or vectors. Parts of one matrix may share a panel, so a matrix is
// never split between threads.
struct Job {
  enum class Kind { kPack, kTable, kVector };
  Kind kind = Kind::kPack;
  std::vector<Part> parts;
  PackedMatrix shape;
  void* memory = nullptr;
  int64_t bytes = 0;  // read
};

absl::Status WithName(const std::string& tensor, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("tensor ", tensor, ": ", status.message()));
}

// Numbers of `dtype` widened to float32, exactly.
void Widen(const void* data, DType dtype, int64_t count, float* out) {
  kernels::VisitDType(dtype, [&](auto zero) {
    using T = decltype(zero);
    const char* in = static_cast<const char*>(data);
    for (int64_t i = 0; i < count; ++i) {
      T stored;
      std::memcpy(&stored, in + static_cast<size_t>(i) * sizeof(T), sizeof(T));
      out[i] = kernels::ToFloat(stored);
    }
  });
}

// The rows of `block` that `part` takes: [begin, end) in the tensor.
struct RowRange {
  int64_t begin;
  int64_t end;
};
RowRange Intersect(const WeightBlock& block, const Part& part) {
  return {std::max(block.first_row, part.first_row),
          std::min(block.first_row + block.num_rows,
                   part.first_row + part.num_rows)};
}

class JobRunner {
 public:
  JobRunner(WeightSource* source, size_t buffer_bytes)
      : source_(source), buffer_(buffer_bytes) {}

  absl::Status Run(const Job& job) {
    int64_t column = 0;  // of the matrix; element of the vector
    for (const Part& part : job.parts) {
      KVASIR_ASSIGN_OR_RETURN(const DType dtype, source_->TypeOf(part.tensor));
      const auto row_bytes =
          static_cast<size_t>(part.columns * kernels::DTypeBytes(dtype));
      if (buffer_.size() < row_bytes) buffer_.resize(row_bytes);
      const absl::Status status = source_->Read(
          part.tensor, buffer_, [&](const WeightBlock& block) -> absl::Status {
            const RowRange rows = Intersect(block, part);
            if (rows.begin >= rows.end) return absl::OkStatus();
            return Take(job, part, dtype, block, rows,
                        column + rows.begin - part.first_row);
          });
      if (!status.ok()) return WithName(part.tensor, status);
      column += part.num_rows;
    }
    if (job.kind == Job::Kind::kPack) {
      kernels::ZeroPadding(job.shape, job.memory);
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Take(const Job& job, const Part& part, DType dtype,
                    const WeightBlock& block, RowRange rows, int64_t column) {
    const int64_t width = kernels::DTypeBytes(dtype);
    const int64_t count = rows.end - rows.begin;
    const char* const first =
        static_cast<const char*>(block.data) +
        (rows.begin - block.first_row) * part.columns * width;
    if (job.kind == Job::Kind::kVector) {
      Widen(first, dtype, count, static_cast<float*>(job.memory) + column);
      return absl::OkStatus();
    }
    if (job.kind == Job::Kind::kTable) {
      std::memcpy(
          static_cast<char*>(job.memory) + column * part.columns * width, first,
          static_cast<size_t>(count * part.columns * width));
      return absl::OkStatus();
    }
    kernels::RowBlock rows_in;
    rows_in.num_rows = count;
    rows_in.row_stride = part.columns;
    if (dtype == job.shape.dtype) {
      rows_in.data = first + part.first_column * width;
    } else {
      wide_.resize(static_cast<size_t>(count * part.columns));
      Widen(first, dtype, count * part.columns, wide_.data());
      rows_in.data = wide_.data() + part.first_column;
    }
    return kernels::PackRows(job.shape, rows_in, column, job.memory);
  }

  WeightSource* const source_;
  std::vector<std::byte> buffer_;
  std::vector<float> wide_;
};

// Lists the jobs of a model and allocates their memory.
class Planner {
 public:
  Planner(const model::DecoderSpec& spec, WeightSource* source,
          kernels::DeviceAllocator* allocator, base::TpShard shard,
          ModelWeights* weights)
      : spec_(spec),
        source_(source),
        allocator_(allocator),
        shard_(shard),
        weights_(weights) {}

  absl::Status PlanAll() {
    weights_->layers.resize(spec_.layers.size());
    for (int64_t layer = 0; layer < spec_.num_layers(); ++layer) {
      KVASIR_RETURN_IF_ERROR(PlanLayer(layer));
    }
    const int64_t m = spec_.hidden_size;
    KVASIR_RETURN_IF_ERROR(
        Vector({{std::string(model::kFinalNormName), 1, 0, m, 0}},
               &weights_->final_norm));
    const std::string embedding(model::kEmbeddingName);
    const std::string head =
        spec_.tied_head ? embedding : std::string(model::kHeadName);
    KVASIR_RETURN_IF_ERROR(
        Matrix({{head, m, 0, spec_.vocab_size, 0}}, m, &weights_->head));
    return spec_.tied_head ? absl::OkStatus() : Table(embedding);
  }

  // Largest first, so that threads end together.
  std::vector<Job> TakeJobs() {
    std::stable_sort(
        jobs_.begin(), jobs_.end(),
        [](const Job& a, const Job& b) { return a.bytes > b.bytes; });
    return std::move(jobs_);
  }

 private:
  absl::Status PlanLayer(int64_t index) {
    const ShardSizes& shard = weights_->shard;
    LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
    const int64_t m = spec_.hidden_size;
    const int64_t f = spec_.intermediate_size;
    const int64_t d = spec_.head_dim;
    const auto name = [index](const char* part) {
      return model::LayerTensorName(index, part);
    };
    const int64_t q_first = shard.first_q_head * d;
    const int64_t q_rows = shard.num_q_heads * d;
    const int64_t kv_first = shard.kv_heads.first * d;
    const int64_t kv_rows = shard.kv_heads.count * d;
    const int64_t f_first = shard.first_feature;
    const int64_t f_rows = shard.num_features;

    KVASIR_RETURN_IF_ERROR(Vector(
        {{name("input_layernorm.weight"), 1, 0, m, 0}}, &layer.input_norm));
    KVASIR_RETURN_IF_ERROR(
        Vector({{name("post_attention_layernorm.weight"), 1, 0, m, 0}},
               &layer.post_norm));
    KVASIR_RETURN_IF_ERROR(
        Matrix({{name("self_attn.q_proj.weight"), m, q_first, q_rows, 0},
                {name("self_attn.k_proj.weight"), m, kv_first, kv_rows, 0},
                {name("self_attn.v_proj.weight"), m, kv_first, kv_rows, 0}},
               m, &layer.qkv));
    KVASIR_RETURN_IF_ERROR(Matrix(
        {{name("self_attn.o_proj.weight"), spec_.num_heads * d, 0, m, q_first}},
        q_rows, &layer.o));
    KVASIR_RETURN_IF_ERROR(
        Matrix({{name("mlp.gate_proj.weight"), m, f_first, f_rows, 0},
                {name("mlp.up_proj.weight"), m, f_first, f_rows, 0}},
               m, &layer.gate_up));
    KVASIR_RETURN_IF_ERROR(
        Matrix({{name("mlp.down_proj.weight"), f, 0, m, f_first}}, f_rows,
               &layer.down));
    if (spec_.qkv_bias) {
      KVASIR_RETURN_IF_ERROR(
          Vector({{name("self_attn.q_proj.bias"), 1, q_first, q_rows, 0},
                  {name("self_attn.k_proj.bias"), 1, kv_first, kv_rows, 0},
                  {name("self_attn.v_proj.bias"), 1, kv_first, kv_rows, 0}},
                 &layer.qkv_bias));
    }
    if (spec_.o_bias) {
      KVASIR_RETURN_IF_ERROR(
          SummedBias(name("self_attn.o_proj.bias"), &layer.o_bias));
    }
    if (spec_.mlp_bias) {
      KVASIR_RETURN_IF_ERROR(
          Vector({{name("mlp.gate_proj.bias"), 1, f_first, f_rows, 0},
                  {name("mlp.up_proj.bias"), 1, f_first, f_rows, 0}},
                 &layer.gate_up_bias));
      KVASIR_RETURN_IF_ERROR(
          SummedBias(name("mlp.down_proj.bias"), &layer.down_bias));
    }
    return absl::OkStatus();
  }

  // Added by rank 0 alone; the others read it for the fingerprint only.
  absl::Status SummedBias(const std::string& tensor, const float** out) {
    const float* bias = nullptr;
    KVASIR_RETURN_IF_ERROR(
        Vector({{tensor, 1, 0, spec_.hidden_size, 0}}, &bias));
    *out = shard_.rank == 0 ? bias : nullptr;
    return absl::OkStatus();
  }

  absl::StatusOr<void*> Allocate(int64_t bytes) {
    KVASIR_ASSIGN_OR_RETURN(kernels::DeviceBuffer buffer,
                            allocator_->Allocate(static_cast<size_t>(bytes),
                                                 kernels::MemoryTag::kWeights));
    weights_->buffers.push_back(std::move(buffer));
    return weights_->buffers.back().data();
  }

  absl::Status Matrix(std::vector<Part> parts, int64_t k, PackedMatrix* out) {
    Job job;
    job.shape.k = k;
    for (size_t i = 0; i < parts.size(); ++i) {
      KVASIR_ASSIGN_OR_RETURN(const DType dtype,
                              source_->TypeOf(parts[i].tensor));
      if (i == 0) job.shape.dtype = dtype;
      if (dtype != job.shape.dtype) job.shape.dtype = DType::kF32;
      job.shape.n += parts[i].num_rows;
    }
    job.parts = std::move(parts);
    job.bytes = job.shape.bytes();
    KVASIR_ASSIGN_OR_RETURN(job.memory, Allocate(job.bytes));
    *out = job.shape;
    out->data = job.memory;
    weights_->matrix_bytes += job.bytes;
    jobs_.push_back(std::move(job));
    return absl::OkStatus();
  }

  absl::Status Table(const std::string& tensor) {
    Job job;
    job.kind = Job::Kind::kTable;
    KVASIR_ASSIGN_OR_RETURN(weights_->embedding_dtype, source_->TypeOf(tensor));
    job.bytes = spec_.vocab_size * spec_.hidden_size *
                kernels::DTypeBytes(weights_->embedding_dtype);
    job.parts = {{tensor, spec_.hidden_size, 0, spec_.vocab_size, 0}};
    KVASIR_ASSIGN_OR_RETURN(job.memory, Allocate(job.bytes));
    weights_->embedding = job.memory;
    jobs_.push_back(std::move(job));
    return absl::OkStatus();
  }

  absl::Status Vector(std::vector<Part> parts, const float** out) {
    Job job;
    job.kind = Job::Kind::kVector;
    for (const Part& part : parts) {
      job.bytes += part.num_rows * static_cast<int64_t>(sizeof(float));
    }
    job.parts = std::move(parts);
    KVASIR_ASSIGN_OR_RETURN(job.memory, Allocate(job.bytes));
    *out = static_cast<const float*>(job.memory);
    jobs_.push_back(std::move(job));
    return absl::OkStatus();
  }

  const model::DecoderSpec& spec_;
  WeightSource* const source_;
  kernels::DeviceAllocator* const allocator_;
  const base::TpShard shard_;
  ModelWeights* const weights_;
  std::vector<Job> jobs_;
};

// Hands jobs to the pool's threads; the first error stops the rest.
absl::Status RunJobs(const std::vector<Job>& jobs, WeightSource* source,
                     const LoadOptions& options) {
  int64_t total_bytes = 0;
  for (const Job& job : jobs) total_bytes += job.bytes;
  base::Mutex mutex;
  absl::Status status;
  int64_t done_bytes = 0;
  std::atomic<size_t> next = 0;
  options.pool->Run([&](int) {
    JobRunner runner(source, options.read_buffer_bytes);
    while (true) {
      const size_t index = next.fetch_add(1);
      if (index >= jobs.size()) return;
      const absl::Status result = runner.Run(jobs[index]);
      base::MutexLock lock(&mutex);
      if (!result.ok()) {
        status.Update(result);
        next = jobs.size();
        return;
      }
      done_bytes += jobs[index].bytes;
      if (options.progress) options.progress(done_bytes, total_bytes);
    }
  });
  return status;
}

}  // namespace

absl::StatusOr<ShardSizes> ShardSizes::Create(const model::DecoderSpec& spec,
                                              base::TpShard shard) {
  ShardSizes sizes;
  KVASIR_ASSIGN_OR_RETURN(sizes.kv_heads,
                          base::KvHeadsOfRank(shard, spec.num_kv_heads));
  if (spec.num_heads % shard.size != 0 ||
      spec.intermediate_size % shard.size != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        spec.num_heads, " query heads and ", spec.intermediate_size,
        " MLP features cannot be dealt equally to ", shard.size,
        " tensor-parallel ranks"));
  }
  sizes.num_q_heads = spec.num_heads / shard.size;
  sizes.first_q_head = shard.rank * sizes.num_q_heads;
  sizes.num_features = spec.intermediate_size / shard.size;
  sizes.first_feature = shard.rank * sizes.num_features;
  return sizes;
}

absl::StatusOr<ModelWeights> LoadWeights(const model::DecoderSpec& spec,
                                         WeightSource* source,
                                         kernels::DeviceAllocator* allocator,
                                         const LoadOptions& options) {
  ModelWeights weights;
  KVASIR_ASSIGN_OR_RETURN(weights.shard,
                          ShardSizes::Create(spec, options.shard));
  Planner planner(spec, source, allocator, options.shard, &weights);
  KVASIR_RETURN_IF_ERROR(planner.PlanAll());
  KVASIR_RETURN_IF_ERROR(RunJobs(planner.TakeJobs(), source, options));
  weights.weights_id = source->WeightsId();
  return weights;
}

}  // namespace kvasir::worker
