/* Search in pages opened as files, for which browsers start no workers: the worker's script runs in
   a hidden frame. In place of the package of this name, which would be loaded from another host. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const worker = this.frame.contentWindow
      worker.postMessage = (data) => window.dispatchEvent(
        new MessageEvent("message", { data, source: worker })
      )
      worker.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)))
      window.addEventListener("message", (event) => {
        if (event.source !== worker) return
        const answer = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(answer)
        if (this.onmessage) this.onmessage(answer)
      })
      this.worker = worker
      this.ready = this.load(url)
    }

    load(url) {
      const page = this.frame.contentDocument
      const script = page.createElement("script")
      script.src = new URL(url, location)
      const loaded = new Promise((resolve) => (script.onload = resolve))
      page.body.appendChild(script)
      return loaded
    }

    postMessage(data) {
      this.ready.then(() => this.worker.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
