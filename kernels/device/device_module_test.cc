#include "kernels/device/device_module.h"

#include <dlfcn.h>
#include <gnu/libc-version.h>

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::kernels {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DeviceModuleTest, TheErrorForAMissingFileNamesTheFile) {
  EXPECT_THAT(LoadDevice("/nowhere/module.so", {}),
              StatusIs(absl::StatusCode::kNotFound,
                       "/nowhere/module.so: no such file"));
}

TEST(DeviceModuleTest, AFileThatIsNotALibraryIsRefused) {
  const std::string file = absl::StrCat(std::getenv("KVASIR_SOURCE_DIR"),
                                        "/kernels/device/device_module.h");
  EXPECT_THAT(
      LoadDevice(file, {}),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr(file), HasSubstr("is not a device module"))));
}

TEST(DeviceModuleTest, ALibraryThatIsNotADeviceModuleIsRefused) {
  // Finds the file of the C library: a library that is not a device module.
  Dl_info info;
  ASSERT_NE(::dladdr(reinterpret_cast<void*>(&::gnu_get_libc_version), &info),
            0);
  EXPECT_THAT(LoadDevice(info.dli_fname, {}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("it has no function KvasirDeviceModule")));
}

TEST(DeviceModuleTest, ADeviceModuleOfAnotherBuildIsRefused) {
  const std::string file = std::getenv("KVASIR_OTHER_MODULE");
  EXPECT_THAT(LoadDevice(file, {}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(file),
                             HasSubstr("its interface is another, this "
                                       "program's is "),
                             HasSubstr(DeviceInterface()))));
}

}  // namespace
}  // namespace kvasir::kernels
