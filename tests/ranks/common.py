"""What the cases of a rank share."""

import math

import layouts


def layout_of(name, *arguments):
    return getattr(layouts, name)(*arguments)


def backward(layout, step, scale=1.0):
    batch = layouts.whole_batch(step, scale)
    if hasattr(layout, "backward"):
        layout.backward(batch)
    else:
        layouts.loss_of(layout.model, layout.feed(batch)).backward()


def reference_gradients(step, scale=1.0):
    net = layouts.Net()
    layouts.loss_of(net, layouts.whole_batch(step, scale)).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def norm_of(tensors):
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def bits(zclip):
    return [value.hex() if isinstance(value, float) else value for value in zclip.state_dict().values()]


def error_of(run, kind=RuntimeError):
    try:
        run()
    except kind as error:
        return str(error)
    return "no error"
