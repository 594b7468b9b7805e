// The only file that includes torch, and of torch only what reads a tensor's pointer and size: it decides how long a
// first import takes.
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "norm_cpu.h"
#if defined(ZCLIP_WITH_CUDA)
#include "zclip_cuda.h"
#endif
#include "zclip_rule.h"

namespace py = pybind11;

namespace {

using TensorCaster = py::detail::type_caster<at::Tensor>;

const at::Tensor& unpack(py::handle object, TensorCaster* caster) {
    if (!caster->load(object, false)) throw py::type_error("expected a torch.Tensor");
    return static_cast<at::Tensor&>(*caster);
}

// Where kernels run: the CPU, or a CUDA device by its index.
constexpr int kCpu = -1;
constexpr int kElsewhere = -2;

int place_of(c10::Device device) {
    if (device.is_cpu()) return kCpu;
#if defined(ZCLIP_WITH_CUDA)
    if (device.is_cuda()) return device.index();
#endif
    return kElsewhere;
}

void* memory(py::handle object, at::ScalarType dtype, int64_t at_least, int place, const char* name) {
    TensorCaster caster;
    const at::Tensor& tensor = unpack(object, &caster);
    const bool fits = place_of(tensor.device()) == place && tensor.scalar_type() == dtype && tensor.is_contiguous() &&
                      tensor.numel() >= at_least;
    if (fits) return tensor.mutable_data_ptr();
    const std::string where = place == kCpu ? "on the CPU" : "on CUDA device " + std::to_string(place);
    throw py::value_error(std::string(name) + ": expected a contiguous " + c10::toString(dtype) +
                          " tensor of at least " + std::to_string(at_least) + " elements " + where);
}

double* doubles(py::handle object, int64_t at_least, int place, const char* name) {
    return static_cast<double*>(memory(object, at::ScalarType::Double, at_least, place, name));
}

// What the kernels read: dense, strided, of a dtype they know. Anything else, for Python to prepare.
bool as_segment(const c10::TensorImpl& tensor, zclip::Segment* segment) {
    const bool plain =
        tensor.layout() == at::kStrided && !tensor.is_python_dispatch() && tensor.is_non_overlapping_and_dense();
    if (!plain) return false;
    int64_t parts = 1;
    switch (c10::typeMetaToScalarType(tensor.dtype())) {
        case at::ScalarType::Half:
            segment->dtype = zclip::Dtype::kFloat16;
            break;
        case at::ScalarType::BFloat16:
            segment->dtype = zclip::Dtype::kBFloat16;
            break;
        case at::ScalarType::ComplexFloat:
            parts = 2;
            [[fallthrough]];
        case at::ScalarType::Float:
            segment->dtype = zclip::Dtype::kFloat32;
            break;
        case at::ScalarType::ComplexDouble:
            parts = 2;
            [[fallthrough]];
        case at::ScalarType::Double:
            segment->dtype = zclip::Dtype::kFloat64;
            break;
        default:
            return false;
    }
    segment->size = parts * tensor.numel();
    segment->data = const_cast<void*>(tensor.data());
    return segment->data != nullptr || segment->size == 0;  // autograd's zero tensors have no memory
}

// A set of addresses, open-addressed: one look at each of thousands of small tensors must not cost more than the
// tensor.
class Seen {
   public:
    explicit Seen(size_t items) {
        while (slots_ < 2 * items) slots_ *= 2;
        table_.resize(slots_, nullptr);
    }
    bool insert(const void* address) {
        size_t slot = (reinterpret_cast<uintptr_t>(address) >> 4) * 0x9e3779b97f4a7c15u >> 20 & (slots_ - 1);
        while (table_[slot] != nullptr && table_[slot] != address) slot = (slot + 1) & (slots_ - 1);
        const bool is_new = table_[slot] == nullptr;
        table_[slot] = address;
        return is_new;
    }

   private:
    size_t slots_ = 16;
    std::vector<const void*> table_;
};

// Asks for the memory of tensors that come soon. Most torch versions keep the address of a tensor behind the header of
// its Python object; where another word stands there, a useless hint is all that comes of it.
void fetch_ahead(const py::list& objects, size_t i) {
    constexpr size_t kNear = 8, kFar = 16;
    if (i + kFar < objects.size()) __builtin_prefetch(PyList_GET_ITEM(objects.ptr(), i + kFar));
    if (i + kNear < objects.size()) {
        PyObject* const object = PyList_GET_ITEM(objects.ptr(), i + kNear);
        const void* word = nullptr;
        if (Py_TYPE(object)->tp_basicsize >= Py_ssize_t{sizeof(PyObject) + sizeof word}) {
            std::memcpy(&word, reinterpret_cast<const char*>(object) + sizeof(PyObject), sizeof word);
        }
        __builtin_prefetch(word);
    }
}

// The gradients of a step: held, and as segments for the kernels.
struct Gradients {
    std::vector<c10::intrusive_ptr<c10::TensorImpl>> tensors;
    std::vector<zclip::Segment> segments;
    int place = kCpu;
};

// From tensors, or from the parameters whose gradients they are: read here, they need no Python objects. A tensor that
// comes twice is kept once. Null where one is no segment, or they are not all in one place.
//
// The tensors of a real model are not in the cache after its backward. Three plain loops, the counting of references
// apart from the rest, let the processor wait for many of them at a time.
std::unique_ptr<Gradients> gather(const py::list& objects, bool are_parameters) {
    std::vector<c10::TensorImpl*> tensors;
    tensors.reserve(objects.size());
    TensorCaster caster;
    for (size_t i = 0; i < objects.size(); ++i) {
        fetch_ahead(objects, i);
        tensors.push_back(unpack(PyList_GET_ITEM(objects.ptr(), i), &caster).unsafeGetTensorImpl());
    }

    auto grads = std::make_unique<Gradients>();
    grads->segments.reserve(tensors.size());
    Seen seen(tensors.size());
    size_t kept = 0;
    for (c10::TensorImpl* tensor : tensors) {
        if (are_parameters) {
            if (tensor->is_python_dispatch()) return nullptr;
            const at::Tensor& grad = tensor->grad();
            if (!grad.defined()) continue;
            tensor = grad.unsafeGetTensorImpl();
        }
        if (!seen.insert(tensor)) continue;
        zclip::Segment segment;
        const int place = place_of(tensor->device());
        if (kept == 0) grads->place = place;
        if (place == kElsewhere || place != grads->place || !as_segment(*tensor, &segment)) return nullptr;
        if (segment.size > 0) grads->segments.push_back(segment);
        tensors[kept++] = tensor;
    }
    grads->tensors.reserve(kept);
    for (size_t i = 0; i < kept; ++i) {
        grads->tensors.push_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(tensors[i]));
    }
    return grads;
}

// The segments for a kernel that writes.
std::vector<zclip::Segment> writable(const Gradients& grads) {
    std::vector<zclip::Segment> segments(grads.tensors.size());
    for (size_t i = 0; i < segments.size(); ++i) {
        grads.tensors[i]->bump_version();
        grads.tensors[i]->mutable_data();  // memory that is shared until somebody writes becomes the tensor's own
        as_segment(*grads.tensors[i], &segments[i]);
    }
    return segments;
}

// What one step of the rule reads and writes, by pointers.
struct Decision {
    Decision(py::handle sums, py::handle state, py::handle config, py::handle record, int place)
        : sums(doubles(sums, 2, place, "sums")),
          state(reinterpret_cast<zclip::State*>(doubles(state, kState, place, "state"))),
          buffer(reinterpret_cast<double*>(this->state) + kState),
          config(reinterpret_cast<const zclip::Config*>(doubles(config, kConfig, place, "config"))),
          record(reinterpret_cast<zclip::Record*>(doubles(record, kRecord, place, "record"))) {}

    static constexpr int64_t kState = sizeof(zclip::State) / sizeof(double);
    static constexpr int64_t kConfig = sizeof(zclip::Config) / sizeof(double);
    static constexpr int64_t kRecord = sizeof(zclip::Record) / sizeof(double);
    const double* sums;
    zclip::State* state;
    double* buffer;  // of warm-up samples; as long as the configuration that made the state says
    const zclip::Config* config;
    zclip::Record* record;
};

void local_sumsq(const Gradients& grads, const py::handle& out, int threads) {
    double* const result = doubles(out, 2, kCpu, "out");
    py::gil_scoped_release without_gil;
    const zclip::SumOfSquares total = zclip::sum_of_squares_cpu(grads.segments, threads);
    result[0] = total.sum;
    result[1] = total.nonfinite;
}

void scale(const Gradients& grads, double factor, int threads) {
    std::vector<zclip::Segment> segments = writable(grads);
    py::gil_scoped_release without_gil;
    zclip::scale_cpu(std::move(segments), factor, threads);
}

void decide(const py::handle& sums, const py::handle& state, const py::handle& config, const py::handle& record) {
    const Decision step(sums, state, config, record, kCpu);
    const bool keeps_samples = step.config->robust_warmup != 0.0;
    doubles(state, Decision::kState + (keeps_samples ? static_cast<int64_t>(step.config->warmup_steps) : 0), kCpu,
            "state");
    zclip::decide(step.sums[0], step.sums[1], *step.config, step.state, step.buffer, step.record);
}

#if defined(ZCLIP_WITH_CUDA)
// `stream` is the number of a stream of the tensors' device, as torch gives it.
zclip::Queue queue(int place, int64_t stream) { return {place, reinterpret_cast<void*>(stream)}; }

int64_t workspace(const Gradients& grads) { return zclip::cuda_workspace(grads.segments); }

void local_sumsq_cuda(const Gradients& grads, const py::handle& space, const py::handle& ticket, const py::handle& out,
                      int64_t stream) {
    double* const sums = doubles(space, workspace(grads), grads.place, "workspace");
    auto* const counter = static_cast<unsigned*>(memory(ticket, at::ScalarType::Int, 1, grads.place, "ticket"));
    double* const result = doubles(out, 2, grads.place, "out");
    py::gil_scoped_release without_gil;
    zclip::sum_of_squares_cuda(grads.segments, sums, counter, result, queue(grads.place, stream));
}

void scale_cuda(const Gradients& grads, const py::handle& factor, int64_t stream) {
    const double* const by = doubles(factor, 1, grads.place, "factor");
    std::vector<zclip::Segment> segments = writable(grads);
    py::gil_scoped_release without_gil;
    zclip::scale_cuda(std::move(segments), by, queue(grads.place, stream));
}

// `left_out`: float32, or None.
void decide_cuda(const py::handle& sums, const py::handle& state, const py::handle& config, const py::handle& record,
                 const py::handle& left_out, int place, int64_t stream) {
    const Decision step(sums, state, config, record, place);
    void* const flag = left_out.is_none() ? nullptr : memory(left_out, at::ScalarType::Float, 1, place, "left_out");
    zclip::decide_cuda(step.sums, step.config, step.state, step.buffer, step.record, static_cast<float*>(flag),
                       queue(place, stream));
}
#endif

#define ZCLIP_NAME(name) #name,
std::vector<std::vector<std::string>> layout() {
    return {{ZCLIP_CONFIG_FIELDS(ZCLIP_NAME)}, {ZCLIP_STATE_FIELDS(ZCLIP_NAME)}, {ZCLIP_RECORD_FIELDS(ZCLIP_NAME)}};
}

}  // namespace

#define ZCLIP_TEXT(word) ZCLIP_TEXT_OF(word)
#define ZCLIP_TEXT_OF(word) #word

PYBIND11_MODULE(_zclip_C, m) {
    py::class_<Gradients>(m, "Gradients", py::module_local())
        .def("__len__", [](const Gradients& grads) { return grads.tensors.size(); })
        .def_readonly("place", &Gradients::place);
    m.def("gather", &gather);
    m.def("local_sumsq", &local_sumsq);
    m.def("scale", &scale);
    m.def("decide", &decide);
    m.def("layout", &layout);
#if defined(ZCLIP_WITH_CUDA)
    m.attr("cuda") = true;
    m.def("workspace", &workspace);
    m.def("local_sumsq_cuda", &local_sumsq_cuda);
    m.def("scale_cuda", &scale_cuda);
    m.def("decide_cuda", &decide_cuda);
#else
    m.attr("cuda") = false;
#endif
    m.attr("fingerprint") = ZCLIP_TEXT(ZCLIP_FINGERPRINT);
}
