#include "kernels/cuda/real_cublaslt.h"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#endif
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/mutex.h"

namespace kvasir::kernels::cuda {

#if !__has_include(<cublasLt.h>)

absl::StatusOr<std::unique_ptr<CublasLt>> OpenCublasLt(
    const std::vector<std::string>&) {
  return absl::UnimplementedError(
      "cuBLASLt: this program was built without cublasLt.h beside CUDA's other "
      "headers; with --deterministic it is not needed");
}
absl::StatusOr<CublasLt*> RealCublasLt() { return OpenCublasLt({}).status(); }
absl::Status DescribesForTesting(CublasLt&, const GemmShape&) {
  return absl::OkStatus();
}

#else

namespace {

static_assert(sizeof(CublasHandle) == sizeof(cublasLtHandle_t));
static_assert(sizeof(GemmAlgorithm::data) == sizeof(cublasLtMatmulAlgo_t));
static_assert(static_cast<int>(CublasResult::kOk) == CUBLAS_STATUS_SUCCESS);

// The major version of cuBLASLt, which is the same as that of CUDA's runtime.
constexpr int kMajor = CUDART_VERSION / 1000;

// Lists the functions of cuBLASLt that are used here.
#define KVASIR_CUBLASLT_FUNCTIONS(Each)                                        \
  Each(cublasLtGetVersion) Each(cublasLtGetStatusName) Each(cublasLtCreate)    \
      Each(cublasLtDestroy) Each(cublasLtMatmulDescCreate)                     \
          Each(cublasLtMatmulDescDestroy) Each(cublasLtMatmulDescSetAttribute) \
              Each(cublasLtMatrixLayoutCreate)                                 \
                  Each(cublasLtMatrixLayoutDestroy)                            \
                      Each(cublasLtMatmulPreferenceCreate)                     \
                          Each(cublasLtMatmulPreferenceDestroy)                \
                              Each(cublasLtMatmulPreferenceSetAttribute)       \
                                  Each(cublasLtMatmulAlgoGetHeuristic)         \
                                      Each(cublasLtMatmul)

struct Functions {
#define KVASIR_DECLARE(name) decltype(&::name) name = nullptr;
  KVASIR_CUBLASLT_FUNCTIONS(KVASIR_DECLARE)
#undef KVASIR_DECLARE

  // Finds all functions in the library. Returns the name of the first that is
  // missing, or null.
  const char* Find(void* library) {
#define KVASIR_FIND(function)                                                 \
  function = reinterpret_cast<decltype(function)>(dlsym(library, #function)); \
  if (function == nullptr) return #function;
    KVASIR_CUBLASLT_FUNCTIONS(KVASIR_FIND)
#undef KVASIR_FIND
    return nullptr;
  }
};

cudaDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kBf16:
      return CUDA_R_16BF;
    case DType::kF32:
      break;
  }
  return CUDA_R_32F;
}

// cuBLASLt's description of a product. In memory, the library expects
// matrices column by column, so it sees our row-major matrices transposed.
// The product for the library is y' [n, rows] = W [n, k] * x' [k, rows],
// where W is stored transposed.
class Description {
 public:
  Description(const Functions& functions, const GemmShape& shape,
              const void* bias)
      : functions_(functions) {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    Note(functions_.cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32F,
                                             CUDA_R_32F));
    Set(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
    if (shape.bias) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      const auto type = static_cast<int32_t>(TypeOf(shape.y_dtype));
      Set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
      Set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
      Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    const auto layout = [&](cublasLtMatrixLayout_t* made, DType dtype,
                            int64_t rows, int64_t columns, int64_t stride) {
      Note(functions_.cublasLtMatrixLayoutCreate(
          made, TypeOf(dtype), static_cast<uint64_t>(rows),
          static_cast<uint64_t>(columns), stride));
    };
    layout(&weight_, shape.dtype, shape.k, shape.n, shape.k);
    layout(&x_, shape.dtype, shape.k, shape.rows, shape.x_row_stride);
    layout(&y_, shape.y_dtype, shape.n, shape.rows, shape.y_row_stride);
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;
  ~Description() {
    for (cublasLtMatrixLayout_t layout : {weight_, x_, y_}) {
      if (layout != nullptr) functions_.cublasLtMatrixLayoutDestroy(layout);
    }
    if (product_ != nullptr) functions_.cublasLtMatmulDescDestroy(product_);
  }

  // Returns the first error of any call in this object, or success.
  cublasStatus_t status() const { return status_; }
  cublasLtMatmulDesc_t product() const { return product_; }
  cublasLtMatrixLayout_t weight() const { return weight_; }
  cublasLtMatrixLayout_t x() const { return x_; }
  cublasLtMatrixLayout_t y() const { return y_; }

 private:
  void Note(cublasStatus_t status) {
    if (status_ == CUBLAS_STATUS_SUCCESS) status_ = status;
  }
  template <typename T>
  void Set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    if (status_ != CUBLAS_STATUS_SUCCESS) return;
    Note(functions_.cublasLtMatmulDescSetAttribute(product_, attribute, &value,
                                                   sizeof(value)));
  }

  const Functions& functions_;
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t weight_ = nullptr;
  cublasLtMatrixLayout_t x_ = nullptr;
  cublasLtMatrixLayout_t y_ = nullptr;
};

// The conditions that an algorithm must meet to be chosen.
class Preference {
 public:
  Preference(const Functions& functions, size_t most_workspace_bytes)
      : functions_(functions),
        status_(functions.cublasLtMatmulPreferenceCreate(&preference_)) {
    Set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        static_cast<uint64_t>(most_workspace_bytes));
    // The library may split the sum over k into partial sums. Then it must add
    // them in float32 (not in the type of y) and in a fixed order (not in the
    // order in which they are ready).
    Set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                 CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                 CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                                 CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      Set(attribute, static_cast<uint32_t>(kGemmAlignment));
    }
  }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  ~Preference() {
    if (preference_ != nullptr) {
      functions_.cublasLtMatmulPreferenceDestroy(preference_);
    }
  }
  cublasStatus_t status() const { return status_; }
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  template <typename T>
  void Set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    if (status_ != CUBLAS_STATUS_SUCCESS) return;
    status_ = functions_.cublasLtMatmulPreferenceSetAttribute(
        preference_, attribute, &value, sizeof(value));
  }

  const Functions& functions_;
  cublasLtMatmulPreference_t preference_ = nullptr;
  cublasStatus_t status_;
};

class OpenedCublasLt final : public CublasLt {
 public:
  explicit OpenedCublasLt(const Functions& functions) : functions_(functions) {}

  std::string Describe(CublasResult result) override {
    return absl::StrCat(
        functions_.cublasLtGetStatusName(static_cast<cublasStatus_t>(result)),
        " (", static_cast<int>(result), ")");
  }
  int64_t Version() override {
    return static_cast<int64_t>(functions_.cublasLtGetVersion());
  }
  CublasResult MakeHandle(CublasHandle* handle) override {
    return Of(
        functions_.cublasLtCreate(reinterpret_cast<cublasLtHandle_t*>(handle)));
  }
  CublasResult DestroyHandle(CublasHandle handle) override {
    return Of(functions_.cublasLtDestroy(Handle(handle)));
  }
  CublasResult Choose(CublasHandle handle, const GemmShape& shape,
                      size_t most_workspace_bytes,
                      GemmAlgorithm* algorithm) override {
    const Description description(functions_, shape, nullptr);
    const Preference preference(functions_, most_workspace_bytes);
    for (const cublasStatus_t made :
         {description.status(), preference.status()}) {
      if (made != CUBLAS_STATUS_SUCCESS) return Of(made);
    }
    cublasLtMatmulHeuristicResult_t found = {};
    int count = 0;
    const cublasStatus_t status = functions_.cublasLtMatmulAlgoGetHeuristic(
        Handle(handle), description.product(), description.weight(),
        description.x(), description.y(), description.y(), preference.get(), 1,
        &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS) return Of(status);
    if (count == 0) return Of(CUBLAS_STATUS_NOT_SUPPORTED);
    if (found.state != CUBLAS_STATUS_SUCCESS) return Of(found.state);
    std::memcpy(algorithm->data, &found.algo, sizeof(found.algo));
    algorithm->workspace_bytes = found.workspaceSize;
    return CublasResult::kOk;
  }
  CublasResult Multiply(CublasHandle handle, const GemmShape& shape,
                        const Gemm& gemm, const GemmAlgorithm& algorithm,
                        StreamHandle stream) override {
    const Description description(functions_, shape, gemm.bias);
    if (description.status() != CUBLAS_STATUS_SUCCESS) {
      return Of(description.status());
    }
    cublasLtMatmulAlgo_t algo;
    std::memcpy(&algo, algorithm.data, sizeof(algo));
    const float one = 1.0f, zero = 0.0f;
    // y is also passed as the matrix to be added, but is not read, because beta
    // is 0.
    return Of(functions_.cublasLtMatmul(
        Handle(handle), description.product(), &one, gemm.weight,
        description.weight(), gemm.x, description.x(), &zero, gemm.y,
        description.y(), gemm.y, description.y(), &algo, gemm.workspace,
        algorithm.workspace_bytes, reinterpret_cast<cudaStream_t>(stream)));
  }

  absl::Status Describes(const GemmShape& shape) {
    const Description description(functions_, shape, nullptr);
    const Preference preference(functions_, 1 << 20);
    for (const cublasStatus_t made :
         {description.status(), preference.status()}) {
      if (made != CUBLAS_STATUS_SUCCESS) {
        return absl::InternalError(Describe(Of(made)));
      }
    }
    return absl::OkStatus();
  }

 private:
  static CublasResult Of(cublasStatus_t status) {
    return static_cast<CublasResult>(status);
  }
  static cublasLtHandle_t Handle(CublasHandle handle) {
    return reinterpret_cast<cublasLtHandle_t>(handle);
  }

  const Functions functions_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CublasLt>> OpenCublasLt(
    const std::vector<std::string>& files) {
  std::vector<std::string> tried;
  for (const std::string& file : files) {
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      tried.emplace_back(dlerror());
      continue;
    }
    Functions functions;
    const char* const missing = functions.Find(library);
    if (missing == nullptr) {
      return std::make_unique<OpenedCublasLt>(functions);
    }
    tried.push_back(absl::StrCat(file, ": has no ", missing));
    dlclose(library);
  }
  return absl::NotFoundError(
      absl::StrCat("cuBLASLt was not found: tried ", absl::StrJoin(tried, "; "),
                   ". Install CUDA ", kMajor,
                   "'s libcublas or name its folder in "
                   "LD_LIBRARY_PATH; with --deterministic it is not needed"));
}

absl::StatusOr<CublasLt*> RealCublasLt() {
  static base::Mutex mutex;
  static std::unique_ptr<CublasLt>* const opened =
      new std::unique_ptr<CublasLt>;
  base::MutexLock lock(&mutex);
  if (*opened == nullptr) {
    const std::string name = absl::StrCat("libcublasLt.so.", kMajor);
    auto library = OpenCublasLt(
        {name, absl::StrCat("/usr/local/cuda/lib64/", name),
         absl::StrCat("/usr/local/cuda-", kMajor, ".",
                      CUDART_VERSION % 1000 / 10, "/lib64/", name)});
    if (!library.ok()) return library.status();
    *opened = *std::move(library);
  }
  return opened->get();
}

absl::Status DescribesForTesting(CublasLt& real, const GemmShape& shape) {
  return static_cast<OpenedCublasLt&>(real).Describes(shape);
}

#endif

}  // namespace kvasir::kernels::cuda
