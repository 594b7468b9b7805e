// The only file that includes torch, and of torch only what reads a tensor's pointer and size: it decides how long a
// first import takes.
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "norm_cpu.h"
#include "zclip_rule.h"

namespace py = pybind11;

namespace {

using TensorCaster = py::detail::type_caster<at::Tensor>;

const at::Tensor& unpack(py::handle object, TensorCaster* caster) {
    if (!caster->load(object, false)) throw py::type_error("expected a torch.Tensor");
    return static_cast<at::Tensor&>(*caster);
}

double* doubles(py::handle object, int64_t at_least, const char* name) {
    TensorCaster caster;
    const at::Tensor& tensor = unpack(object, &caster);
    const bool fits = tensor.device().is_cpu() && tensor.scalar_type() == at::ScalarType::Double &&
                      tensor.is_contiguous() && tensor.numel() >= at_least;
    if (!fits) throw py::value_error(std::string(name) + ": expected a contiguous float64 tensor on the CPU");
    return static_cast<double*>(tensor.mutable_data_ptr());
}

// What the kernels read: dense, strided, on the CPU, of a dtype they know. Anything else, for Python to prepare.
bool as_segment(const c10::TensorImpl& tensor, zclip::Segment* segment) {
    const bool plain = tensor.layout() == at::kStrided && tensor.device().is_cpu() && !tensor.is_python_dispatch() &&
                       tensor.is_non_overlapping_and_dense();
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
};

// From tensors, or from the parameters whose gradients they are: read here, they need no Python objects. A tensor that
// comes twice is kept once. Null where one is no segment.
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
        if (!as_segment(*tensor, &segment)) return nullptr;
        if (segment.size > 0) grads->segments.push_back(segment);
        tensors[kept++] = tensor;
    }
    grads->tensors.reserve(kept);
    for (size_t i = 0; i < kept; ++i) {
        grads->tensors.push_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(tensors[i]));
    }
    return grads;
}

void local_sumsq(const Gradients& grads, const py::handle& out, int threads) {
    double* const result = doubles(out, 2, "out");
    py::gil_scoped_release without_gil;
    const zclip::SumOfSquares total = zclip::sum_of_squares_cpu(grads.segments, threads);
    result[0] = total.sum;
    result[1] = total.nonfinite;
}

void scale(const Gradients& grads, double factor, int threads) {
    std::vector<zclip::Segment> segments(grads.tensors.size());
    for (size_t i = 0; i < segments.size(); ++i) {
        grads.tensors[i]->bump_version();
        grads.tensors[i]->mutable_data();  // memory that is shared until somebody writes becomes the tensor's own
        as_segment(*grads.tensors[i], &segments[i]);
    }
    py::gil_scoped_release without_gil;
    zclip::scale_cpu(std::move(segments), factor, threads);
}

void decide(const py::handle& sums, const py::handle& state, const py::handle& config, const py::handle& record) {
    constexpr int64_t kState = sizeof(zclip::State) / sizeof(double);
    constexpr int64_t kConfig = sizeof(zclip::Config) / sizeof(double);
    constexpr int64_t kRecord = sizeof(zclip::Record) / sizeof(double);
    const double* const total = doubles(sums, 2, "sums");
    const auto& rule = *reinterpret_cast<const zclip::Config*>(doubles(config, kConfig, "config"));
    const int64_t buffer = rule.robust_warmup != 0.0 ? static_cast<int64_t>(rule.warmup_steps) : 0;
    double* const numbers = doubles(state, kState + buffer, "state");
    auto* const out = reinterpret_cast<zclip::Record*>(doubles(record, kRecord, "record"));
    zclip::decide(total[0], total[1], rule, reinterpret_cast<zclip::State*>(numbers), numbers + kState, out);
}

#define ZCLIP_NAME(name) #name,
std::vector<std::vector<std::string>> layout() {
    return {{ZCLIP_CONFIG_FIELDS(ZCLIP_NAME)}, {ZCLIP_STATE_FIELDS(ZCLIP_NAME)}, {ZCLIP_RECORD_FIELDS(ZCLIP_NAME)}};
}

}  // namespace

#define ZCLIP_TEXT(word) ZCLIP_TEXT_OF(word)
#define ZCLIP_TEXT_OF(word) #word

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    py::class_<Gradients>(m, "Gradients", py::module_local()).def("__len__", [](const Gradients& grads) {
        return grads.tensors.size();
    });
    m.def("gather", &gather);
    m.def("local_sumsq", &local_sumsq);
    m.def("scale", &scale);
    m.def("decide", &decide);
    m.def("layout", &layout);
    m.attr("fingerprint") = ZCLIP_TEXT(ZCLIP_FINGERPRINT);
}
