/* Browsers refuse to start a Worker on pages opened from a folder (file://). There, this stands in for it: the script runs in a
   hidden frame of the same page, and messages are passed by hand. On a server, the browser's own Worker is used. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.waiting = [];
      const start = () => {
        const inside = this.frame.contentWindow;
        inside.postMessage = data => setTimeout(() => this.deliver(this, data));
        const script = inside.document.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = () => {
          const waiting = this.waiting;
          this.waiting = null;
          waiting.forEach(data => this.postMessage(data));
        };
        script.onerror = () => this.onerror && this.onerror(new ErrorEvent("error", { message: "cannot load " + url }));
        inside.document.head.append(script);
      };
      const attach = () => {
        document.body.append(this.frame);
        start();
      };
      if (document.body) attach();
      else document.addEventListener("DOMContentLoaded", attach);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else setTimeout(() => this.frame.contentWindow && this.deliver(this.frame.contentWindow, data));
    }

    deliver(target, data) {
      const event = new MessageEvent("message", { data: structuredClone(data) });  // neither side may change the other's
      if (target === this && this.onmessage) this.onmessage(event);
      target.dispatchEvent(event);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
