#include "router/replicas/worker_source.h"

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::_;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

auto Target(const std::string& target) {
  return Field(&WorkerAddress::target, target);
}

TEST(ParseWorkersTest, ASingleAddressIsAFixedWorker) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const WorkerList list,
                              ParseWorkers({"a:1", "unix:/b"}));
  EXPECT_THAT(list.fixed, ElementsAre(Target("a:1"), Target("unix:/b")));
  EXPECT_THAT(list.sources, IsEmpty());
}

TEST(ParseWorkersTest, WrongEntriesAreRefusedAndNamed) {
  for (const std::string entry :
       {"dns:///a", "dns:///a:0", "dns:///a:65536", "dns:///:1",
        "dns://8.8.8.8/a:1", "dns:///::1:8100", "dns:///a/b:1", "file:"}) {
    EXPECT_THAT(ParseWorkers({"b:1", entry}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("--workers"), HasSubstr(entry))));
  }
  EXPECT_THAT(ParseWorkers({""}), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("at least one")));
}

TEST(DnsSourceTest, EachAddressIsAWorkerWhoseCertificateHasTheHostsName) {
  absl::StatusOr<std::vector<std::string>> answer =
      std::vector<std::string>{"10.0.0.1", "fd00::2"};
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const WorkerList list,
      ParseWorkers({"dns:///workers:8100"}, [&](const std::string& host) {
        EXPECT_EQ(host, "workers");
        return answer;
      }));
  ASSERT_EQ(list.sources.size(), 1u);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto found, list.sources[0]->Look());
  EXPECT_THAT(found,
              ElementsAre(Target("10.0.0.1:8100"), Target("[fd00::2]:8100")));
  EXPECT_EQ(found[0].tls_name, "workers");
  answer = absl::NotFoundError("no such name");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto none, list.sources[0]->Look());
  EXPECT_THAT(none, IsEmpty());
  answer = absl::UnavailableError("timeout");
  EXPECT_THAT(list.sources[0]->Look(),
              StatusIs(absl::StatusCode::kUnavailable, "timeout"));
}

TEST(ResolveBySystemTest, ReturnsAddressesOfBothFamilies) {
  EXPECT_THAT(*ResolveBySystem("127.0.0.1"), ElementsAre("127.0.0.1"));
  EXPECT_THAT(*ResolveBySystem("::1"), ElementsAre("::1"));
}

TEST(FileSourceTest, EachLineIsAWorker) {
  const base::TempFolder folder;
  const std::string path = folder.File("workers");
  KVASIR_ASSERT_OK_AND_ASSIGN(const WorkerList list,
                              ParseWorkers({absl::StrCat("file:", path)}));
  WorkerSource& source = *list.sources[0];
  EXPECT_THAT(source.Look(), StatusIs(absl::StatusCode::kNotFound, _));
  folder.Write("workers", "# workers\n a:1 # the first\n\nunix:/b\n[::1]:2");
  EXPECT_THAT(*source.Look(),
              ElementsAre(Target("a:1"), Target("unix:/b"), Target("[::1]:2")));
  folder.Write("workers", "a:1\nb\n");
  EXPECT_THAT(source.Look(), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("line 2")));
  folder.Write("workers", "");
  EXPECT_THAT(*source.Look(), IsEmpty());
}

}  // namespace
}  // namespace kvasir::router
