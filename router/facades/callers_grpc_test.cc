// Tests how callers are identified, over real gRPC and TLS, for every call of
// every facade.
#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/net/testing/certificates.h"
#include "base/net/tls.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/inference/grpc_service.pb.h"
#include "proto/vllm/engine.grpc.pb.h"
#include "router/base/refusal_reason.h"
#include "router/facades/facades.h"
#include "router/testing/byte_codec.h"
#include "router/testing/callers_testing.h"
#include "router/testing/facade_server.h"

namespace kvasir::router {
namespace {

using ::testing::HasSubstr;

class CallersGrpcTest : public FacadeServerTest {
 protected:
  CallersGrpcTest() {
    folder_.Write("ca.pem", authority_.certificate);
    Sign("server", {"DNS:localhost", "IP:127.0.0.1"});
    Sign("red", {"DNS:red.example", "URI:spiffe://red"});
    Sign("other", {"DNS:other.example"});
  }
  ~CallersGrpcTest() override {
    channel_.reset();
    server_.reset();
  }

  void Serve(const std::string& entries, bool tls, bool ask_for_certificates) {
    FacadeOptions facade;
    facade.codec = std::make_shared<ByteCodec>();
    facade.callers = CallersOf(entries);
    facades_ = NewFacades(facade, &router_);
    base::GrpcServerOptions options;
    options.explain_garbage = true;
    options.on_garbage = [this](const std::string& method,
                                const grpc::ServerContextBase& context) {
      return FacadeOfMethod(facades_, method)->RefuseGarbage(context);
    };
    if (tls) {
      base::TlsOptions files{.files = Files("server")};
      if (!ask_for_certificates) files.files.authorities.clear();
      options.credentials = *tls_.Server(files);
    }
    auto server = base::GrpcServer::Start(options, ServicesOf(facades_));
    KVASIR_ASSERT_OK(server);
    server_ = *std::move(server);
  }
  // Connects to the server. The client presents the certificate named
  // `certificate`, or none if the name is empty.
  void Dial(bool tls, const std::string& certificate = "") {
    std::shared_ptr<grpc::ChannelCredentials> credentials =
        grpc::InsecureChannelCredentials();
    if (tls) {
      base::TlsOptions options;
      if (!certificate.empty()) options.files = Files(certificate);
      options.files.authorities = folder_.File("ca.pem");
      credentials = *base::TlsChannelCredentials(options);
    }
    channel_ = grpc::CreateChannel(server_->target(), credentials);
  }

  // Calls `method` with these bytes as the message.
  grpc::Status Call(const google::protobuf::MethodDescriptor& method,
                    const std::string& authorization = "",
                    const std::string& bytes = "") {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
    if (!authorization.empty()) {
      context.AddMetadata("authorization", authorization);
    }
    grpc::CompletionQueue queue;
    const auto call = stub.PrepareCall(
        &context,
        absl::StrCat("/", std::string(method.service()->full_name()), "/",
                     std::string(method.name())),
        &queue);
    const auto wait = [&queue] {
      void* tag;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    call->StartCall(nullptr);
    wait();
    const grpc::Slice message(bytes);
    call->WriteLast(grpc::ByteBuffer(&message, 1), grpc::WriteOptions(),
                    nullptr);
    wait();
    grpc::ByteBuffer answer;
    do {
      call->Read(&answer, nullptr);
    } while (wait());
    grpc::Status status;
    call->Finish(&status, nullptr);
    wait();
    return status;
  }
  std::vector<const google::protobuf::ServiceDescriptor*> Services() const {
    std::vector<const google::protobuf::ServiceDescriptor*> services;
    for (const std::string& name : ServiceNamesOf(facades_)) {
      services.push_back(
          google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(
              name));
    }
    return services;
  }
  static const google::protobuf::MethodDescriptor& Method(
      const google::protobuf::ServiceDescriptor& service, const char* name) {
    return *service.FindMethodByName(name);
  }

  base::TlsFiles Files(const std::string& name) const {
    return {.certificate = folder_.File(name + ".pem"),
            .key = folder_.File(name + ".key"),
            .authorities = folder_.File("ca.pem")};
  }
  void Sign(const std::string& name, const std::vector<std::string>& names) {
    const auto made = base::MakeCertificate(authority_, {.names = names});
    folder_.Write(name + ".pem", made.certificate);
    folder_.Write(name + ".key", made.key);
  }

  const base::TestCertificate authority_ = base::MakeAuthority("authority");
  const base::TempFolder folder_;
  base::TlsWatch tls_;
  Facades facades_;
};

const google::protobuf::ServiceDescriptor& Kserve() {
  return *inference::ModelInferRequest::descriptor()->file()->service(0);
}

TEST_F(CallersGrpcTest,
       EveryCallOfEveryFacadeIdentifiesItsCallerAndLogsARefusal) {
  Serve(TenantEntry("red"), /*tls=*/false, false);
  Dial(/*tls=*/false);
  size_t calls = 0;
  for (const auto* service : Services()) {
    for (int i = 0; i < service->method_count(); ++i) {
      const auto& method = *service->method(i);
      const grpc::Status status = Call(method);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED)
          << method.full_name() << ": " << status.error_message();
      EXPECT_THAT(status.error_message(), HasSubstr("no credentials"));
      EXPECT_EQ(router_.refused().size(), ++calls) << method.full_name();
    }
  }
  EXPECT_GT(calls, 50);
  EXPECT_EQ(router_.num_requests(), 0);
}

// Regression test: gRPC parses a message before it calls the service. So
// unknown callers that sent garbage were once not counted, and each of their
// calls caused a log line.
TEST_F(CallersGrpcTest, TheCallerOfAMessageThatCannotBeParsedIsIdentifiedToo) {
  Serve(TenantEntry("red"), /*tls=*/true, /*ask_for_certificates=*/false);
  Dial(/*tls=*/true);
  const std::string garbage(100, '\xff');
  size_t calls = 0;
  for (const auto* service : Services()) {
    for (int i = 0; i < service->method_count(); ++i) {
      const auto& method = *service->method(i);
      const grpc::Status status = Call(method, "", garbage);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED)
          << method.full_name() << ": " << status.error_message();
      EXPECT_THAT(status.error_message(), HasSubstr("no credentials"));
      ASSERT_EQ(router_.refused().size(), ++calls) << method.full_name();
      EXPECT_EQ(RefusalReasonOf(router_.refused().back().second),
                "no_credentials");
    }
  }
  EXPECT_GT(calls, 50);
  const grpc::Status known =
      Call(Method(Kserve(), "ServerLive"), "Bearer red", garbage);
  EXPECT_EQ(known.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(known.error_message(),
              HasSubstr("is not a valid protobuf message"));
  EXPECT_EQ(router_.refused().size(), calls + 1);
  EXPECT_EQ(router_.refused().back().first.tenant, "red");
}

TEST_F(CallersGrpcTest, NoTokenIsAcceptedOverAConnectionWithoutTls) {
  Serve(TenantEntry("red"), /*tls=*/false, false);
  Dial(/*tls=*/false);
  const grpc::Status status =
      Call(Method(Kserve(), "ServerLive"), "Bearer red");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(status.error_message(), HasSubstr("without TLS"));
  EXPECT_THAT(status.error_message(), ::testing::Not(HasSubstr("Bearer red")));
}

TEST_F(CallersGrpcTest, ATokenOverTlsIdentifiesItsCaller) {
  Serve(TenantEntry("red"), /*tls=*/true, /*ask_for_certificates=*/false);
  Dial(/*tls=*/true);
  EXPECT_TRUE(Call(Method(Kserve(), "ServerLive"), "Bearer red").ok());
  EXPECT_EQ(Call(Method(Kserve(), "ServerLive"), "Bearer blue").error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Call(Method(Kserve(), "ServerLive"), "Basic red").error_code(),
            grpc::StatusCode::UNAUTHENTICATED);

  const auto stub = vllm::grpc::engine::VllmEngine::NewStub(channel_);
  vllm::grpc::engine::GenerateRequest message;
  message.set_request_id("r1");
  message.set_stream(true);
  message.mutable_tokenized()->add_input_ids(7);
  grpc::ClientContext context;
  context.AddMetadata("authorization", "Bearer red");
  const auto reader = stub->Generate(&context, message);
  const auto request = router_.WaitFor(0);
  ASSERT_NE(request, nullptr);
  EXPECT_EQ(request->request().tenant, "red");
  EXPECT_EQ(request->request().caller, "t");
  EXPECT_EQ(request->request().cache_salt, "tenant/red");
  request->Complete("ab");
  vllm::grpc::engine::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(CallersGrpcTest, ACertificateIdentifiesItsCallerByDnsAndUriNames) {
  for (const char* name : {"red.example", "spiffe://red"}) {
    Serve(absl::StrCat(R"({"name": "red", "certificates": [")", name,
                       R"("]}, )", TenantEntry("blue")),
          /*tls=*/true, /*ask_for_certificates=*/true);
    Dial(/*tls=*/true, "red");
    EXPECT_TRUE(Call(Method(Kserve(), "ServerLive")).ok()) << name;
    const grpc::Status both =
        Call(Method(Kserve(), "ServerLive"), "Bearer blue");
    EXPECT_EQ(both.error_code(), grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_EQ(both.error_message(),
              "the certificate and the token belong to different tenants");
    Dial(/*tls=*/true, "other");
    EXPECT_EQ(Call(Method(Kserve(), "ServerLive")).error_code(),
              grpc::StatusCode::UNAUTHENTICATED)
        << name;
    StopListening();
  }
}

TEST_F(CallersGrpcTest, OneTenantCannotAbortTheRequestOfAnotherTenant) {
  Serve(absl::StrCat(TenantEntry("red"), ", ", TenantEntry("blue")),
        /*tls=*/true, /*ask_for_certificates=*/false);
  Dial(/*tls=*/true);
  const auto stub = vllm::grpc::engine::VllmEngine::NewStub(channel_);
  vllm::grpc::engine::GenerateRequest message;
  message.set_request_id("r1");
  message.set_stream(true);
  message.mutable_tokenized()->add_input_ids(7);
  grpc::ClientContext context;
  context.AddMetadata("authorization", "Bearer red");
  const auto reader = stub->Generate(&context, message);
  const auto request = router_.WaitFor(0);
  ASSERT_NE(request, nullptr);
  vllm::grpc::engine::AbortRequest abort;
  abort.add_request_ids("r1");
  vllm::grpc::engine::AbortResponse nothing;
  for (const char* who : {"blue", "red"}) {
    EXPECT_FALSE(request->cancelled());
    grpc::ClientContext aborting;
    aborting.AddMetadata("authorization", absl::StrCat("Bearer ", who));
    EXPECT_TRUE(stub->Abort(&aborting, abort, &nothing).ok());
  }
  WaitUntilCancelled(*request);
  request->Done(absl::CancelledError("aborted"));
  vllm::grpc::engine::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
}

}  // namespace
}  // namespace kvasir::router
